"""Files of a folder, archive or image that are mapped; hidden ones, no links out; Windows.

Nothing here leaves the tree. No link to a file is followed: the file is either in the tree, and
found there, or no part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.errors import FormatError, OptionError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    ELFCLASS64,
    ELFDATA2LSB,
    EM_CUDA,
    ET_DYN,
    ET_EXEC,
)
from pytest_negativa.gpucode.mapping import (
    MappedLibrary,
    MapRequest,
    OnDone,
    map_libraries,
    map_source,
)
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.images.archive_kinds import CONDA_SUFFIX, OLD_CONDA_SUFFIX
from pytest_negativa.images.archives import Entry, File, OnProblem, iter_archive
from pytest_negativa.images.layers import find_image, is_container, iter_layers
from pytest_negativa.images.overlay import HardLink, Link, Overlay
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.file_kinds import (
    ELF_MAGIC,
    is_loadable,
    is_named_code,
    is_spare,
    kind_of,
)
from pytest_negativa.storage.system import read_head

# CUDA has no other hosts.
_ELF_64_LSB = ELF_MAGIC + bytes([ELFCLASS64, ELFDATA2LSB])
# No loader takes object files and core dumps.
_LOADED_TYPES = (ET_EXEC, ET_DYN)
_ANY_LIBRARY = _ELF_64_LSB.ljust(16, b"\0") + bytes([ET_DYN]).ljust(EHDR.size - 16, b"\0")
_DIST_INFO = ".dist-info"
# By its platform tags (PEP 425); one for another system besides has libraries that are read.
_WINDOWS_WHEEL = re.compile(r"-(\.?win(32|_\w+))+\.whl$")
# What tells which package installed a file; see ``images.owners``.
_PACKAGE_LISTS = re.compile(
    r"(.*/)?[^/]+\.dist-info/RECORD|(.*/)?conda-meta/[^/]+\.json"
    r"|(.*/)?dpkg/(status|info/[^/]+\.list)"
)
# Of a conda package. Source: "Package specification" of conda's documentation.
_CONDA_INDEX = "info/index.json"
# Bytes. An image with all of CUDA, Python and its packages has 60 MB of them.
_MAX_LIST = 64 << 20
_MAX_LISTS = 1 << 30


@dataclass(slots=True, eq=False)
class FoundFile:
    """A file of a tree: one that may hold GPU code, or a list of packages.

    Attributes:
        size: bytes.
        place: of a file that is still to be mapped.
        mapped: of a file that could be read in passing alone.
        text: of a list of packages.
    """

    size: int = 0
    place: Path | Member | None = None
    mapped: MappedLibrary | None = None
    text: bytes | None = None

    @property
    def is_code(self) -> bool:
        return (self.place or self.mapped) is not None


@dataclass(slots=True)
class FileTree:
    """Visible files of a folder, an archive or an image, with all its layers in place.

    Attributes:
        root: real path of the folder or archive.
        libraries: the mapped files, by path below the root. A file with several hard links is
            listed once.
        aliases: other names of listed files, with the listed name.
        lists: the lists of packages.
        dist_infos: folders with the metadata of wheels.
        hidden: sizes of files to map that lie in a layer and are hidden by an upper one.
        problems: what is wrong with the tree, or with files in it.
        overlay: its names, with all links.
    """

    root: Path
    libraries: dict[str, MappedLibrary] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    lists: dict[str, bytes] = field(default_factory=dict)
    dist_infos: set[str] = field(default_factory=set)
    hidden: list[int] = field(default_factory=list)
    problems: list[FormatError] = field(default_factory=list)
    overlay: Overlay[FoundFile] = field(default_factory=Overlay)

    def read_list(self, path: str) -> str:
        """A package list; empty if it is no regular file, too large, or unreadable."""
        return self.lists.get(path, b"").decode(errors="surrogateescape")

    @property
    def conda_package(self) -> tuple[str, str] | None:
        """Name and version if the tree is a conda package; None for others."""
        if not self.root.name.endswith((CONDA_SUFFIX, OLD_CONDA_SUFFIX)):
            return None
        try:
            index = json.loads(self.lists.get(_CONDA_INDEX, b"{}"))
            return str(index["name"]), str(index["version"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @property
    def distribution(self) -> tuple[str, str] | None:
        """Name and version if the tree is a wheel (PEP 427) or a conda package."""
        # Those in folders are of packages that it brings along.
        own = [folder for folder in self.dist_infos if "/" not in folder]
        return name_and_version(own[0]) if len(own) == 1 else self.conda_package


def name_and_version(folder: str) -> tuple[str, str]:
    """Name and version in the name of a folder ``NAME-VERSION.dist-info``."""
    # A version has no dash there.
    name, _, version = folder.removesuffix(_DIST_INFO).rpartition("-")
    return name.replace("_", "-"), version


def is_host(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a program or library for the CPU."""
    if not head.startswith(_ELF_64_LSB) or len(head) < EHDR.size:
        return False
    header = EHDR.unpack_from(head)
    return header.e_type in _LOADED_TYPES and header.e_machine != EM_CUDA


def read_tree(
    path: Path,
    request: MapRequest,
    cache: MapCache | None = None,
    workers: Workers | None = None,
    on_done: OnDone | None = None,
    *,
    by_package: bool = False,
) -> FileTree:
    """Map all libraries in a folder, in an archive or in a saved image.

    Libraries of a compressed tar archive are read in passing, one after the other.

    Args:
        request: what to find out about the files that may hold GPU code.
        cache: where the maps of the libraries of a folder are kept; None: nowhere.
        workers: who reads; None: a process for each processor.
        by_package: keep the lists of packages, and leave out files for linkers and compilers.

    Raises:
        OptionError: the folder can't be listed.
    """
    tree = FileTree(path.resolve())
    if _WINDOWS_WHEEL.search(path.name):
        problem = "a wheel for Windows, whose libraries (PE files: .dll, .pyd) are not read"
        tree.problems.append(FormatError(path, None, problem))
    layers: defaultdict[int, dict[str, FoundFile | Link | HardLink | None]] = defaultdict(dict)
    left = _MAX_LISTS
    try:
        for number, entries in _iter_layers(path, tree):
            layer = layers[number]
            for name, node in entries:
                # A file of the same name before this one is gone when the archive is unpacked.
                layer.pop(name, None)
                if isinstance(node, File):
                    found = _look_at(name, node, tree, request, left, by_package=by_package)
                    left -= 0 if found.text is None else found.size
                layer[name] = found if isinstance(node, File) else node
    except FormatError as e:
        tree.problems.append(e)
    for number in sorted(layers):
        for name in tree.overlay.unpack(layers[number]):
            link = layers[number][name]
            if ".so" in name and isinstance(link, HardLink):
                problem = f"is a hard link to {link.target}, which is not before it; it is not read"
                tree.problems.append(FormatError(tree.root / name, None, problem))
    places = list(_show_all(tree))
    for mapped in map_libraries(places, request, cache, workers, on_done):
        tree.libraries[mapped.path.relative_to(tree.root).as_posix()] = mapped
    return tree


def _iter_layers(path: Path, tree: FileTree) -> Iterator[tuple[int, Iterator[Entry]]]:
    """The layers of an image; any other tree has one."""
    if not is_container(path):
        yield 0, _iter_folder(tree.root, tree.problems.append)
    elif (image := find_image(path)) is not None:
        yield from iter_layers(image, tree.problems.append)
    else:
        yield 0, iter_archive(path, tree.problems.append)


def _iter_folder(root: Path, on_problem: OnProblem) -> Iterator[Entry]:
    """The files and links of a folder; file systems mounted in it are left out."""
    listed: dict[tuple[int, int], str] = {}

    def note(error: OSError) -> None:
        problem = f"cannot be listed: {error.strerror}"
        if error.filename == os.fspath(root):
            raise OptionError(problem, root)
        on_problem(FormatError(error.filename, None, problem))

    for here, folders, names in os.walk(root, onerror=note):
        folders[:] = sorted(f for f in folders if not os.path.ismount(os.path.join(here, f)))
        below = os.path.relpath(here, root)
        for name in (*folders, *sorted(names)):
            shown, path = os.path.normpath(os.path.join(below, name)), os.path.join(here, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISLNK(status.st_mode):
                    yield shown, Link(os.readlink(path))  # noqa: PTH115
                elif stat.S_ISREG(status.st_mode):
                    first = listed.setdefault((status.st_dev, status.st_ino), shown)
                    if first != shown:
                        yield shown, HardLink(first)
                    else:
                        yield shown, File(status.st_size, _head_of(path), Path(path))


def _head_of(path: str) -> bytes:
    try:
        return read_head(path)
    except PermissionError:
        # The step that reads the library reports it.
        return _ANY_LIBRARY if is_named_code(path) else b""


def _look_at(
    name: str, file: File, tree: FileTree, request: MapRequest, left: int, *, by_package: bool
) -> FoundFile:
    """Read what is of interest of a file.

    Args:
        left: bytes that lists of packages may have.
        by_package: see ``read_tree``.
    """
    if (folder := name.rpartition("/")[0]).endswith(_DIST_INFO):
        tree.dist_infos.add(folder)
    if is_spare(name):
        return FoundFile()
    path, found = tree.root / name, FoundFile(file.size)
    try:
        if name == _CONDA_INDEX or (by_package and _PACKAGE_LISTS.fullmatch(name)):
            if file.size <= min(left, _MAX_LIST):
                with file.open(str(path)) as source:
                    found.text = source.read(0, source.size)
            return found
        is_run = is_host(file.head) or is_loadable(file.head)
        if is_run if by_package else kind_of(file.head) is not None:
            found.place = file.place
            if isinstance(file.place, Member):
                found.place = replace(file.place, shown_in=str(tree.root))
            elif file.place is None:
                with file.open(str(path)) as source:
                    found.mapped = map_source(path, source, request)
    except FormatError as e:
        tree.problems.append(e)
    return found


def _show_all(tree: FileTree) -> Iterator[Path | Member]:
    """Fill the tree with what is visible; yields the files that are still to be mapped."""
    shown: dict[FoundFile, str] = {}
    walked = tree.overlay.walk()
    for name, file in ((name, node) for name, node in walked if not isinstance(node, Link)):
        if file.text is not None:
            tree.lists[name] = file.text
        elif file in shown:
            tree.aliases[name] = shown[file]
        elif file.mapped is not None:
            shown[file] = name
            tree.libraries[name] = file.mapped.at(tree.root / name)
        elif (place := file.place) is not None:
            shown[file] = name
            yield replace(place, name=name) if isinstance(place, Member) else place
    tree.hidden = [file.size for file in tree.overlay.placed - shown.keys() if file.is_code]
