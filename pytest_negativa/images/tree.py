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
from pathlib import Path

from pytest_negativa.errors import OptionError
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    ELF_MAGIC,
    ELFCLASS64,
    ELFDATA2LSB,
    EM_CUDA,
    ET_DYN,
    ET_EXEC,
)
from pytest_negativa.images.contents import CodeFile, Contents, code_file_of
from pytest_negativa.images.layers import resolve_links
from pytest_negativa.installed.record import RECORD, iter_rows
from pytest_negativa.models.file_kinds import HEAD_SIZE, is_spare
from pytest_negativa.models.image import Manager, Package
from pytest_negativa.storage.system import read_regular

# CUDA has no other hosts.
_ELF_64_LSB = ELF_MAGIC + bytes([ELFCLASS64, ELFDATA2LSB])
# No loader takes object files and core dumps.
_LOADED_TYPES = (ET_EXEC, ET_DYN)
_ANY_LIBRARY = _ELF_64_LSB.ljust(16, b"\0") + bytes([ET_DYN]).ljust(EHDR.size - 16, b"\0")
# The lists of the largest packages have a few MB.
_MAX_LIST_SIZE = 64 << 20
_DPKG = "var/lib/dpkg"


@dataclass(frozen=True, slots=True)
class Tree:
    """Files of a walk over a file tree, by path below the root.

    Attributes:
        root: real path.
        files: 64-bit programs and shared libraries with their sizes in bytes. A file with several
            hard links is listed once.
        aliases: other names of these files, with the listed name.
        code_files: files that are GPU code themselves, likewise.
        dist_infos: folders with the metadata of an installed wheel.
        conda_metas: folders with the metadata of a conda environment.
        unlisted: messages about folders that could not be listed.
        contents: of an archive or a saved image; None for a folder.
    """

    root: Path
    files: dict[str, int]
    aliases: dict[str, str]
    code_files: dict[str, CodeFile]
    dist_infos: tuple[str, ...]
    conda_metas: tuple[str, ...]
    unlisted: tuple[str, ...]
    contents: Contents | None = None

    def link_target(self, path: str) -> str | None:
        """The literal target of a symbolic link; None for anything else."""
        if self.contents is not None:
            return self.contents.links.get(path)
        try:
            return os.readlink(self.root / path)  # noqa: PTH115 (a text)
        except OSError:
            return None

    def names_in(self, folder: str, suffix: str) -> list[str]:
        """The paths of the package lists in a folder that end so."""
        if self.contents is None:
            return sorted(f"{folder}/{p.name}" for p in (self.root / folder).glob(f"*{suffix}"))
        return sorted(
            path
            for path in self.contents.lists
            if path.rpartition("/")[0] == folder and path.endswith(suffix)
        )

    def read_list(self, path: str) -> str:
        """A package list; empty if it is no regular file, too large, or unreadable."""
        if self.contents is None:
            return _read(self.root / path)
        return self.contents.lists.get(path, b"").decode(errors="surrogateescape")


def walk_tree(folder: Path) -> Tree:
    """Find the ELF files and package lists of a tree; file systems mounted in it are left out.

    Raises:
        OptionError: the folder can't be listed.
    """
    root = folder.resolve()
    files: dict[str, int] = {}
    code_files: dict[str, CodeFile] = {}
    aliases: dict[str, str] = {}
    listed: dict[tuple[int, int], str] = {}
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
            if is_spare(name):
                continue
            with contextlib.suppress(OSError):
                status = path.lstat()
                identity = (status.st_dev, status.st_ino)
                if not stat.S_ISREG(status.st_mode):
                    continue
                shown = os.path.normpath(os.path.join(below, name))
                if (first := listed.setdefault(identity, shown)) != shown:
                    aliases[shown] = first
                    continue
                head = _head_of(path)
                if (code_file := code_file_of(head, status.st_size)) is not None:
                    code_files[shown] = code_file
                elif is_host(head):
                    files[shown] = status.st_size
    metas = tuple(conda_metas)
    return Tree(root, files, aliases, code_files, tuple(dist_infos), metas, tuple(unlisted))


def tree_of(contents: Contents) -> Tree:
    """The tree that an archive or a saved image holds."""
    return Tree(
        root=Path(contents.path),
        files=contents.sizes,
        aliases=contents.aliases,
        code_files=contents.code_files,
        dist_infos=tuple(sorted(_folders(contents, f".dist-info/{RECORD}"))),
        conda_metas=tuple(sorted(_folders(contents, ".json", "conda-meta"))),
        unlisted=tuple(map(str, contents.problems)),
        contents=contents,
    )


def _folders(contents: Contents, suffix: str, name: str = "") -> set[str]:
    """The folders of that name with package lists that end so."""
    folders = {p.rpartition("/")[0] for p in contents.lists if p.endswith(suffix)}
    return {f for f in folders if not name or f.rpartition("/")[2] == name}


def _head_of(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(HEAD_SIZE)
    except PermissionError:
        # The step that reads the library reports it.
        return _ANY_LIBRARY if ".so" in path.name else b""


def is_host(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a program or library for the CPU."""
    if not head.startswith(_ELF_64_LSB) or len(head) < EHDR.size:
        return False
    header = EHDR.unpack_from(head)
    return header.e_type in _LOADED_TYPES and header.e_machine != EM_CUDA


def resolve_inside(tree: Tree, path: str) -> str | None:
    """Resolve the links in a path of the tree; None for a loop of links.

    Parts of the path that don't exist stay as they are.

    Returns:
        The path below the root.
    """
    return resolve_links(path, tree.link_target)


def find_owners(tree: Tree, wanted: Collection[str]) -> dict[str, Package]:
    """Find the packages that installed files, as far as wheels, conda and dpkg tell.

    The claim of a wheel wins over those of conda and dpkg, which may have installed the whole
    environment that holds the wheel.

    Args:
        wanted: files, by path below the root.
    """
    listed = {path: path for path in wanted}
    listed.update((path, first) for path, first in tree.aliases.items() if first in listed)
    names = {path.rpartition("/")[2] for path in listed}
    folders: dict[str, str | None] = {}
    owners: dict[str, Package] = {}
    if tree.contents is not None and (found := tree.contents.conda_package) is not None:
        name, version = found
        owners = dict.fromkeys(wanted, Package(name=name, version=version, manager=Manager.CONDA))
    for path, package in _iter_claims(tree):
        folder, _, name = path.rpartition("/")
        # An image has far more files than those that are wanted, and links take time to resolve.
        if name not in names:
            continue
        if folder not in folders:
            folders[folder] = resolve_inside(tree, folder)
        where = folders[folder]
        if where is not None and (real := f"{where}/{name}".lstrip("/")) in listed:
            owners[listed[real]] = package
    return owners


def _iter_claims(tree: Tree) -> Iterator[tuple[str, Package]]:
    """Paths and the packages that claim them; a later claim wins."""
    if (info := resolve_inside(tree, f"{_DPKG}/info")) is not None:
        yield from _iter_dpkg(tree, info)
    for folder in tree.conda_metas:
        yield from _iter_conda(tree, folder)
    for folder in tree.dist_infos:
        yield from _iter_wheel(tree, folder)


def _read(path: Path) -> str:
    """A package list of the tree; empty if it is no regular file, too large, or unreadable."""
    try:
        data = read_regular(path, follow=False, limit=_MAX_LIST_SIZE)
    except OSError:
        return ""
    return data.decode(errors="surrogateescape")


def _iter_wheel(tree: Tree, folder: str) -> Iterator[tuple[str, Package]]:
    """Files of a RECORD ("Recording installed projects", packaging.python.org), in CSV."""
    base, _, own = folder.rpartition("/")
    # NAME-VERSION.dist-info; a version has no dash there.
    name, _, version = own.removesuffix(".dist-info").rpartition("-")
    package = Package(name=name.replace("_", "-"), version=version, manager=Manager.WHEEL)
    with contextlib.suppress(csv.Error):
        for _, row in iter_rows(tree.read_list(f"{folder}/{RECORD}")):
            if row:
                yield f"{base}/{row[0]}" if not row[0].startswith("/") else row[0], package


def _iter_conda(tree: Tree, folder: str) -> Iterator[tuple[str, Package]]:
    """Files of conda-meta/*.json, listed in "files", relative to the environment."""
    base = folder.rpartition("/")[0]
    for path in tree.names_in(folder, ".json"):
        try:
            record = json.loads(tree.read_list(path) or "{}")
            package = Package(
                name=str(record["name"]), version=str(record["version"]), manager=Manager.CONDA
            )
            files = [str(file) for file in record["files"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        for file in files:
            yield f"{base}/{file}", package


def _iter_dpkg(tree: Tree, info: str) -> Iterator[tuple[str, Package]]:
    """Files of info/PACKAGE[:ARCH].list, a path of the image each line; see dpkg-query(1)."""
    versions = _dpkg_versions(tree, info)
    for path in tree.names_in(info, ".list"):
        name = path.rpartition("/")[2].removesuffix(".list").partition(":")[0]
        package = Package(name=name, version=versions.get(name, ""), manager=Manager.DPKG)
        for line in tree.read_list(path).splitlines():
            yield line, package


def _dpkg_versions(tree: Tree, info: str) -> dict[str, str]:
    """Versions by name, of the status file: paragraphs of ``Field: value``, see deb-control(5)."""
    status = tree.read_list(f"{info.rpartition('/')[0]}/status")
    versions: dict[str, str] = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", paragraph, re.MULTILINE))
        if "Package" in fields:
            versions[fields["Package"]] = fields.get("Version", "")
    return versions
