"""A file tree that is no part of this system: its ELF files, and who installed them.

Nothing here leaves the tree. Links are never followed to files, since what they lead to is either
in the tree, and found there, or no part of it. Where a package's list names a file by way
of a link, the link is resolved as inside a changed root: an absolute one starts at the
tree's root, and ``..`` stops there.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_negativa.errors import OptionError
from pytest_negativa.installed.record import RECORD, iter_rows
from pytest_negativa.models.image import Manager, Package

# System V ABI, "ELF Header": magic, ELFCLASS64, ELFDATA2LSB; CUDA has no other hosts. Then
# e_type and e_machine.
_ELF_64_LSB = b"\x7fELF\x02\x01"
_TYPE_AND_MACHINE = struct.Struct("<16xHH")
# ET_EXEC, ET_DYN. Object files and core dumps are not loaded.
_LOADED_TYPES = (2, 3)
_EM_CUDA = 190
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
        files: 64-bit programs and shared libraries, each once however many hard links it has;
            sizes in bytes.
        cubins: bare cubins, alike.
        dist_infos: folders with the metadata of an installed wheel.
        conda_metas: folders with the metadata of an environment of conda.
        unlisted: folders that could not be listed, and why.
    """

    root: Path
    files: dict[str, int]
    cubins: dict[str, int]
    dist_infos: tuple[str, ...]
    conda_metas: tuple[str, ...]
    unlisted: tuple[str, ...]


def walk_tree(folder: Path) -> Tree:
    """Walk a tree, without other file systems that are mounted in it.

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
                    found = cubins if machine == _EM_CUDA else files
                    found[os.path.normpath(os.path.join(below, name))] = status.st_size
    return Tree(root, files, cubins, tuple(dist_infos), tuple(conda_metas), tuple(unlisted))


def _machine_of(path: Path) -> int | None:
    """The ELF machine of what a loader or a driver could load; None for any other file."""
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(_TYPE_AND_MACHINE.size)
    except PermissionError:
        # Whoever reads it next reports it.
        return 0 if ".so" in path.name else None
    if not head.startswith(_ELF_64_LSB) or len(head) < _TYPE_AND_MACHINE.size:
        return None
    kind, machine = _TYPE_AND_MACHINE.unpack(head)
    return machine if kind in _LOADED_TYPES else None


def resolve_inside(root: Path, path: str) -> str | None:
    """Where a path of the tree leads, below the root; None for a loop of links.

    What isn't there stays as it is.
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
    """The packages that installed these files, as far as wheels, conda and dpkg tell.

    A wheel's claim goes before conda's and dpkg's, which may have installed the whole
    environment it is in.
    """
    owners = _Owners(tree.root, wanted)
    if (info := _folder_inside(tree.root, f"{_DPKG}/info")) is not None:
        owners.add(_iter_dpkg(tree.root, info))
    for folder in tree.conda_metas:
        owners.add(_iter_conda(tree.root, folder))
    for folder in tree.dist_infos:
        owners.add(_iter_wheel(tree.root, folder))
    return owners.found


class _Owners:
    """Matches what lists of packages name with the files that are asked for."""

    def __init__(self, root: Path, wanted: Collection[str]) -> None:
        self._root = root
        self._wanted = frozenset(wanted)
        self._names = frozenset(path.rpartition("/")[2] for path in wanted)
        self._folders: dict[str, str | None] = {}
        self.found: dict[str, Package] = {}

    def add(self, claims: Iterator[tuple[str, Callable[[], Package]]]) -> None:
        for path, package in claims:
            folder, _, name = path.rpartition("/")
            # Few of an image's files are asked for, and links take time to resolve.
            if name not in self._names:
                continue
            if folder not in self._folders:
                self._folders[folder] = resolve_inside(self._root, folder)
            where = self._folders[folder]
            if where is not None and (real := f"{where}/{name}".lstrip("/")) in self._wanted:
                self.found[real] = package()


def _folder_inside(root: Path, path: str) -> str | None:
    found = resolve_inside(root, path)
    return found if found is not None and (root / found).is_dir() else None


def _read(path: Path) -> str:
    """A list of the tree; empty if it isn't a regular file, or not readable."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_LIST_SIZE:
                return ""
            return file.read().decode(errors="surrogateescape")
    except OSError:
        return ""


def _iter_wheel(root: Path, folder: str) -> Iterator[tuple[str, Callable[[], Package]]]:
    """What RECORD names ("Recording installed projects", packaging.python.org), in CSV."""
    base, _, own = folder.rpartition("/")
    # NAME-VERSION.dist-info; a version has no dash there.
    name, _, version = own.removesuffix(".dist-info").rpartition("-")
    package = Package(name=name.replace("_", "-"), version=version, manager=Manager.WHEEL)
    with contextlib.suppress(csv.Error):
        for _, row in iter_rows(_read(root / folder / RECORD)):
            if row:
                yield f"{base}/{row[0]}" if not row[0].startswith("/") else row[0], lambda: package


def _iter_conda(root: Path, folder: str) -> Iterator[tuple[str, Callable[[], Package]]]:
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
            yield f"{base}/{file}", lambda package=package: package  # type: ignore[misc]


def _iter_dpkg(root: Path, info: str) -> Iterator[tuple[str, Callable[[], Package]]]:
    """What info/PACKAGE[:ARCH].list names, a path of the image each line; see dpkg-query(1)."""
    versions: dict[str, str] = {}

    def package_of(name: str) -> Package:
        if not versions:
            versions.update(_dpkg_versions(root, info))
        return Package(name=name, version=versions.get(name, ""), manager=Manager.DPKG)

    for path in sorted((root / info).glob("*.list")):
        name = path.name.removesuffix(".list").partition(":")[0]
        for line in _read(path).splitlines():
            yield line, lambda name=name: package_of(name)  # type: ignore[misc]


def _dpkg_versions(root: Path, info: str) -> dict[str, str]:
    """Versions by name, of the status file: paragraphs of ``Field: value``, see deb-control(5)."""
    status = _read(root / PurePosixPath(info).parent / "status")
    versions: defaultdict[str, str] = defaultdict(str)
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", paragraph, re.MULTILINE))
        if "Package" in fields:
            versions[fields["Package"]] = fields.get("Version", "")
    return versions
