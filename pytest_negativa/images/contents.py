"""The libraries in an archive or a saved image, mapped in place or in passing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.arch import SmArch
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.files import bare_arch
from pytest_negativa.gpucode.mapping import (
    MappedLibrary,
    MapRequest,
    map_libraries,
    map_source,
)
from pytest_negativa.gpucode.source import ByteSource, MemorySource, open_source
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.images.archive_kinds import HEAD_SIZE, ArchiveKind, archive_kind
from pytest_negativa.images.archives import Entry, iter_archive
from pytest_negativa.images.layers import Image, find_image, iter_layers
from pytest_negativa.images.overlay import HardLink, Link, Overlay
from pytest_negativa.models.archive import Member
from pytest_negativa.models.file_kinds import FileKind, is_loadable, is_spare, kind_of

_DIST_INFO = ".dist-info"
# By its platform tags (PEP 425); one for another system besides has libraries that are read.
_WINDOWS_WHEEL = re.compile(r"-(\.?win(32|_\w+))+\.whl$")
# What tells which package installed a file; see ``images.tree``.
_PACKAGE_LISTS = re.compile(
    r"(.*/)?[^/]+\.dist-info/RECORD|(.*/)?conda-meta/[^/]+\.json|var/lib/dpkg/(status|info/[^/]+\.list)"
)
# Of a conda package. Source: "Package specification" of conda's documentation.
_CONDA_SUFFIXES, _CONDA_INDEX = (".conda", ".tar.bz2"), "info/index.json"
# Bytes. An image with all of CUDA, Python and its packages has 60 MB of them.
_MAX_LIST = 64 << 20
_MAX_LISTS = 1 << 30

OnDone = Callable[[int, int], None]
"""Called with the bytes of the libraries that are done, and of all."""


class CodeFile(NamedTuple):
    """A file that a driver loads directly.

    Attributes:
        size: bytes.
        arch: None if the first bytes don't tell.
    """

    size: int
    kind: FileKind
    arch: SmArch | None


def code_file_of(head: bytes, size: int) -> CodeFile | None:
    """The file, by its first ``HEAD_SIZE`` bytes; None if no driver loads it directly."""
    kind = kind_of(head)
    return CodeFile(size, kind, bare_arch(head)) if kind is not None and is_loadable(head) else None


@dataclass(frozen=True, slots=True)
class Question:
    """Facts that a caller asks for about the files of an archive.

    Attributes:
        wants: whether to map a file that begins with these bytes.
        request: what to find out about a file of this size.
        with_lists: whether to keep the lists of packages, and files that are GPU code themselves.
    """

    wants: Callable[[bytes], bool]
    request: Callable[[int], MapRequest]
    with_lists: bool = False


@dataclass(slots=True)
class Contents:
    """Visible files of an archive or image, with all its layers in place.

    Attributes:
        path: real path of the archive.
        libraries: the mapped files, by path in the archive.
        sizes: of these files, in bytes. A file with several hard links is listed once.
        aliases: other names of listed files, with the listed name.
        code_files: files that are GPU code themselves, if they were to be kept.
        links: targets of symbolic links.
        lists: the lists of packages.
        dist_infos: folders with the metadata of wheels.
        hidden: files to map that lie in a layer and are hidden by an upper one, with their sizes.
        problems: what is wrong with the archive, or with files in it.
    """

    path: str
    libraries: dict[str, MappedLibrary] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    code_files: dict[str, CodeFile] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    lists: dict[str, bytes] = field(default_factory=dict)
    dist_infos: set[str] = field(default_factory=set)
    hidden: list[tuple[str, int]] = field(default_factory=list)
    problems: list[FormatError] = field(default_factory=list)

    @property
    def conda_package(self) -> tuple[str, str] | None:
        """Name and version if the archive is a conda package; None for others."""
        if not self.path.endswith(_CONDA_SUFFIXES):
            return None
        try:
            index = json.loads(self.lists.get(_CONDA_INDEX, b"{}"))
            return str(index["name"]), str(index["version"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @property
    def distribution(self) -> tuple[str, str] | None:
        """Name and version if the archive is a wheel (PEP 427) or a conda package."""
        # Those in folders are of packages that it brings along.
        own = [folder for folder in self.dist_infos if "/" not in folder]
        if len(own) != 1:
            return self.conda_package
        name, _, version = own[0].removesuffix(_DIST_INFO).rpartition("-")
        return name.replace("_", "-"), version


@dataclass(slots=True, eq=False)
class _File:
    """A file of a layer, as far as it is of interest."""

    member: Member | None = None
    mapped: MappedLibrary | None = None
    size: int = 0
    code_file: CodeFile | None = None
    text: bytes | None = None

    @property
    def is_listed(self) -> bool:
        return (self.member or self.mapped or self.code_file) is not None


_NOTHING = _File()
_Layer = dict[str, _File | Link | HardLink | None]
"""What a layer holds, see ``overlay.Layer``; an archive that is no image has one."""


def may_hold_code(head: bytes) -> bool:
    """Whether a file that begins with these bytes may hold GPU code."""
    return kind_of(head) is not None


def map_archive(
    path: Path,
    question: Question,
    workers: Workers | None = None,
    on_done: OnDone | None = None,
) -> Contents:
    """Map all libraries in an archive, or in a saved image; nothing is cached.

    Libraries of a compressed tar archive are read in passing, one after the other.

    Args:
        question: what to find out about which files.
        workers: who reads; None: a process for each processor.
    """
    contents = Contents(str(path.resolve()))
    if _WINDOWS_WHEEL.search(path.name):
        problem = "a wheel for Windows, whose libraries (PE files: .dll, .pyd) are not read"
        contents.problems.append(FormatError(path, None, problem))
    layers: defaultdict[int, _Layer] = defaultdict(dict)
    left = _MAX_LISTS
    try:
        for number, entries in _iter_layers(path, contents):
            layer = layers[number] = {}
            for entry in entries:
                left -= _take(entry, layer, contents, question, left)
    except FormatError as e:
        contents.problems.append(e)
    members = _merge(layers, contents)
    _map_members(members, contents, question, workers, on_done)
    return contents


def _iter_layers(path: Path, contents: Contents) -> Iterator[tuple[int, Iterator[Entry]]]:
    image = _find_image(path)
    if image is None:
        yield 0, iter_archive(path, contents.problems.append)
    else:
        yield from iter_layers(image, contents.problems.append)


def _find_image(path: Path) -> Image | None:
    if path.is_dir():
        return find_image(path)
    with ByteSource(path) as source:
        kind = archive_kind(source.read(0, min(HEAD_SIZE, source.size)))
    return None if kind in (None, ArchiveKind.ZIP) else find_image(path)


def _take(entry: Entry, layer: _Layer, contents: Contents, question: Question, left: int) -> int:
    """Take a file of a layer; returns the bytes of lists that are kept."""
    name = entry.name
    # A file of the same name before this one is gone when the archive is unpacked.
    layer.pop(name, None)
    if entry.is_folder:
        layer[name] = None
        return 0
    folder = name.rpartition("/")[0]
    if folder.endswith(_DIST_INFO):
        contents.dist_infos.add(folder)
    if entry.linked is not None:
        layer[name] = HardLink(entry.linked)
        return 0
    if entry.target is not None:
        layer[name] = Link(entry.target)
        return 0
    layer[name] = _NOTHING
    try:
        if name == _CONDA_INDEX or (question.with_lists and _PACKAGE_LISTS.fullmatch(name)):
            if entry.size > min(left, _MAX_LIST):
                return 0
            layer[name] = _File(text=_content(entry))
            return entry.size
        code_file = code_file_of(entry.head, entry.size) if question.with_lists else None
        member = mapped = None
        if question.wants(entry.head) and not is_spare(name):
            if entry.member is not None:
                member = replace(entry.member, shown_in=contents.path)
            else:
                where = Path(contents.path, name)
                source = MemorySource(str(where), entry.read(), 0)
                mapped = map_source(where, source, question.request(entry.size))
        file = _File(member, mapped, entry.size, code_file)
        if file.is_listed:
            layer[name] = file
    except FormatError as e:
        contents.problems.append(e)
    return 0


def _content(entry: Entry) -> bytes:
    if entry.member is None:
        return bytes(entry.read())
    with open_source(entry.member) as source:
        return source.read(0, source.size)


def _merge(layers: dict[int, _Layer], contents: Contents) -> dict[str, Member]:
    """Put the layers over each other; returns the files that are still to be mapped."""
    overlay: Overlay[_File] = Overlay()
    for _, layer in sorted(layers.items()):
        for name in overlay.unpack(layer):
            link = layer[name]
            if ".so" in name and isinstance(link, HardLink):
                problem = f"is a hard link to {link.target}, which is not before it; it is not read"
                contents.problems.append(FormatError(Path(contents.path, name), None, problem))
    members: dict[str, Member] = {}
    shown: dict[_File, str] = {}
    for name, file in overlay.walk():
        if isinstance(file, Link):
            contents.links[name] = file.target
        elif file.text is not None:
            contents.lists[name] = file.text
        elif file in shown:
            contents.aliases[name] = shown[file]
        elif file.is_listed:
            shown[file] = name
            _show(file, name, contents, members)
    for file in overlay.placed.keys() - shown.keys():
        if file.member is not None or file.mapped is not None:
            contents.hidden.append((overlay.placed[file], file.size))
    return members


def _show(file: _File, name: str, contents: Contents, members: dict[str, Member]) -> None:
    if file.code_file is not None:
        contents.code_files[name] = file.code_file
    if file.member is not None:
        members[name] = replace(file.member, name=name)
    if file.mapped is not None:
        contents.libraries[name] = file.mapped.at(Path(contents.path, name))
    if file.member is not None or file.mapped is not None:
        contents.sizes[name] = file.size


def _map_members(
    members: dict[str, Member],
    contents: Contents,
    question: Question,
    workers: Workers | None,
    on_done: OnDone | None,
) -> None:
    names = {member.path: name for name, member in members.items()}
    by_request: defaultdict[MapRequest, list[Member]] = defaultdict(list)
    for member in members.values():
        by_request[question.request(member.size)].append(member)
    total, done = sum(member.size for member in members.values()), 0
    for request, group in by_request.items():
        for mapped in map_libraries(group, request, None, workers):
            name = names[mapped.path]
            contents.libraries[name] = mapped
            done += contents.sizes[name]
            if on_done is not None:
                on_done(done, total)
