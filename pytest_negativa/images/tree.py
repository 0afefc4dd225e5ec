"""A file tree that is no part of this system: its ELF files, and the packages that own them.

Nothing here leaves the tree. The walk follows no link to a file: the file is either in the tree,
and found there, or no part of it. If a package's list names a file by way of a link, the link is
resolved as in a changed root (chroot(2)). An absolute link starts at the tree's root, and ``..``
stops there.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_negativa.errors import OptionError
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    ELF_MAGIC,
    ELFCLASS64,
    ELFDATA2LSB,
    EM_CUDA,
    EM_NONE,
    ET_DYN,
    ET_EXEC,
)
from pytest_negativa.installed.record import RECORD, iter_rows
from pytest_negativa.models.image import Manager, Package

# CUDA has no other hosts.
_ELF_64_LSB = ELF_MAGIC + bytes([ELFCLASS64, ELFDATA2LSB])
# No loader takes object files and core dumps.
_LOADED_TYPES = (ET_EXEC, ET_DYN)
# As many links in one path as Linux follows (path_resolution(7)).
_MAX_LINKS = 40
# The lists of the largest packages have a few MB.
_MAX_LIST_SIZE = 64 << 20
_DPKG = "var/lib/dpkg"


@dataclass(frozen=True, slots=True)
class Tree:
    """What a walk over a file tree found, by path below the root.

    Attributes:
        root: real path.
        files: 64-bit programs and shared libraries with their sizes in bytes. A file with several
            hard links is listed once.
        cubins: bare cubins, likewise.
        dist_infos: folders with the metadata of an installed wheel.
        conda_metas: folders with the metadata of a conda environment.
        unlisted: messages about folders that could not be listed.
    """

    root: Path
    files: dict[str, int]
    cubins: dict[str, int]
    dist_infos: tuple[str, ...]
    conda_metas: tuple[str, ...]
    unlisted: tuple[str, ...]


def walk_tree(folder: Path) -> Tree:
    """Find the ELF files and package lists of a tree; file systems mounted in it are left out.

    Raises:
        OptionError: the folder can't be listed.
    """
    root = folder.resolve()
    files: dict[str, int] = {}
    cubins: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    dist_infos, conda_metas, unlisted = [], [], []

    def note(error: OSError) -> None:
        if error.filename == os.fspath(root):
            raise OptionError(f"{folder}: cannot be listed: {error.strerror}")
        unlisted.append(f"{error.filename}: cannot be listed: {error.strerror}")

    for here, folders, names in os.walk(root, onerror=note):
        folders[:] = sorted(f for f in folders if not os.path.ismount(os.path.join(here, f)))
        below = os.path.relpath(here, root)
        if below.endswith(".dist-info"):
            dist_infos.append(below)
        elif os.path.basename(below) == "conda-meta":  # noqa: PTH119
            conda_metas.append(below)
        for name in sorted(names):
            path = Path(here, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                identity = (status.st_dev, status.st_ino)
                if not stat.S_ISREG(status.st_mode) or identity in seen:
                    continue
                seen.add(identity)
                if (machine := _machine_of(path)) is not None:
                    found = cubins if machine == EM_CUDA else files
                    found[os.path.normpath(os.path.join(below, name))] = status.st_size
    return Tree(root, files, cubins, tuple(dist_infos), tuple(conda_metas), tuple(unlisted))


def _machine_of(path: Path) -> int | None:
    """``e_machine`` of a file that a loader or a driver could load; None for any other file."""
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(EHDR.size)
    except PermissionError:
        # The step that reads the library reports it.
        return EM_NONE if ".so" in path.name else None
    if not head.startswith(_ELF_64_LSB) or len(head) < EHDR.size:
        return None
    header = EHDR.unpack_from(head)
    return header.e_machine if header.e_type in _LOADED_TYPES else None


def resolve_inside(root: Path, path: str) -> str | None:
    """Resolve the links in a path of the tree; None for a loop of links.

    Parts of the path that don't exist stay as they are.

    Returns:
        The path below the root.
    """
    waiting = list(reversed(PurePosixPath(path).parts))
    found: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "/":
            found = []
        elif part == "..":
            del found[-1:]
        else:
            try:
                target = os.readlink(root.joinpath(*found, part))  # noqa: PTH115 (a text)
            except OSError:
                found.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            waiting += reversed(PurePosixPath(target).parts)
    return "/".join(found)


def find_owners(tree: Tree, wanted: Collection[str]) -> dict[str, Package]:
    """Find the packages that installed files, as far as wheels, conda and dpkg tell.

    The claim of a wheel wins over those of conda and dpkg, which may have installed the whole
    environment that holds the wheel.

    Args:
        wanted: files, by path below the root.
    """
    wanted = frozenset(wanted)
    names = {path.rpartition("/")[2] for path in wanted}
    folders: dict[str, str | None] = {}
    owners: dict[str, Package] = {}
    for path, package in _iter_claims(tree):
        folder, _, name = path.rpartition("/")
        # An image has far more files than those that are wanted, and links take time to resolve.
        if name not in names:
            continue
        if folder not in folders:
            folders[folder] = resolve_inside(tree.root, folder)
        where = folders[folder]
        if where is not None and (real := f"{where}/{name}".lstrip("/")) in wanted:
            owners[real] = package
    return owners


def _iter_claims(tree: Tree) -> Iterator[tuple[str, Package]]:
    """Paths and the packages that claim them; a later claim wins."""
    if (info := _folder_inside(tree.root, f"{_DPKG}/info")) is not None:
        yield from _iter_dpkg(tree.root, info)
    for folder in tree.conda_metas:
        yield from _iter_conda(tree.root, folder)
    for folder in tree.dist_infos:
        yield from _iter_wheel(tree.root, folder)


def _folder_inside(root: Path, path: str) -> str | None:
    found = resolve_inside(root, path)
    return found if found is not None and (root / found).is_dir() else None


def _read(path: Path) -> str:
    """A package list of the tree; empty if it is no regular file, too large, or unreadable."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_LIST_SIZE:
                return ""
            return file.read().decode(errors="surrogateescape")
    except OSError:
        return ""


def _iter_wheel(root: Path, folder: str) -> Iterator[tuple[str, Package]]:
    """What RECORD names ("Recording installed projects", packaging.python.org), in CSV."""
    base, _, own = folder.rpartition("/")
    # NAME-VERSION.dist-info; a version has no dash there.
    name, _, version = own.removesuffix(".dist-info").rpartition("-")
    package = Package(name=name.replace("_", "-"), version=version, manager=Manager.WHEEL)
    with contextlib.suppress(csv.Error):
        for _, row in iter_rows(_read(root / folder / RECORD)):
            if row:
                yield f"{base}/{row[0]}" if not row[0].startswith("/") else row[0], package


def _iter_conda(root: Path, folder: str) -> Iterator[tuple[str, Package]]:
    """What conda-meta/*.json names in "files", relative to the environment."""
    base = folder.rpartition("/")[0]
    for path in sorted((root / folder).glob("*.json")):
        try:
            record = json.loads(_read(path) or "{}")
            package = Package(
                name=str(record["name"]), version=str(record["version"]), manager=Manager.CONDA
            )
            files = [str(file) for file in record["files"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        for file in files:
            yield f"{base}/{file}", package


def _iter_dpkg(root: Path, info: str) -> Iterator[tuple[str, Package]]:
    """What info/PACKAGE[:ARCH].list names, a path of the image each line; see dpkg-query(1)."""
    versions = _dpkg_versions(root, info)
    for path in sorted((root / info).glob("*.list")):
        name = path.name.removesuffix(".list").partition(":")[0]
        package = Package(name=name, version=versions.get(name, ""), manager=Manager.DPKG)
        for line in _read(path).splitlines():
            yield line, package


def _dpkg_versions(root: Path, info: str) -> dict[str, str]:
    """Versions by name, of the status file: paragraphs of ``Field: value``, see deb-control(5)."""
    status = _read(root / PurePosixPath(info).parent / "status")
    versions: dict[str, str] = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", paragraph, re.MULTILINE))
        if "Package" in fields:
            versions[fields["Package"]] = fields.get("Version", "")
    return versions
