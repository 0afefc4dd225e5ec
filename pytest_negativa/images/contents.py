"""The libraries in an archive, mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.mapping import (
    MappedLibrary,
    MapRequest,
    map_libraries,
    map_source,
)
from pytest_negativa.gpucode.source import MemorySource
from pytest_negativa.images.archives import Entry, iter_archive
from pytest_negativa.models.archive import Member
from pytest_negativa.models.file_kinds import FileKind, kind_of

_DIST_INFO = ".dist-info"

OnDone = Callable[[int, int], None]
"""Called with the bytes of the archive that are done, and of all."""


@dataclass(slots=True)
class Contents:
    """What an archive holds.

    Attributes:
        path: real path of the archive.
        libraries: by path in the archive.
        dist_infos: folders with the metadata of wheels.
        problems: what is wrong with the archive, or with files in it.
    """

    path: str
    libraries: dict[str, MappedLibrary] = field(default_factory=dict)
    dist_infos: set[str] = field(default_factory=set)
    problems: list[FormatError] = field(default_factory=list)

    @property
    def distribution(self) -> tuple[str, str] | None:
        """Name and version if the archive is a wheel (PEP 427); None for others."""
        if len(self.dist_infos) != 1:
            return None
        [folder] = self.dist_infos
        name, _, version = folder.removesuffix(_DIST_INFO).rpartition("-")
        return (name.replace("_", "-"), version) if "/" not in name else None


def map_archive(
    path: Path, request: MapRequest, jobs: int | None = None, on_done: OnDone | None = None
) -> Contents:
    """Map all libraries in an archive; nothing is written to disk, the cache included.

    Libraries of a compressed tar archive are read in passing, one after the other.

    Args:
        request: what to find out about each.
        jobs: how many processes read; None: one for each processor.
    """
    contents = Contents(str(path.resolve()))
    members: dict[str, Member] = {}
    try:
        for entry in iter_archive(path, contents.problems.append):
            _take(entry, contents, members, request)
    except FormatError as e:
        contents.problems.append(e)
    _map_members(members, contents, request, jobs, on_done)
    return contents


def _take(
    entry: Entry, contents: Contents, members: dict[str, Member], request: MapRequest
) -> None:
    # A file of the same name before this one is gone when the archive is unpacked.
    contents.libraries.pop(entry.name, None)
    members.pop(entry.name, None)
    folder = entry.name.rpartition("/")[0]
    if folder.endswith(_DIST_INFO):
        contents.dist_infos.add(folder)
    kind = kind_of(entry.head)
    if kind is None or not (request.any_file or kind is FileKind.LIBRARY):
        return
    if entry.member is not None:
        members[entry.name] = entry.member
        return
    where = Path(contents.path, entry.name)
    try:
        source = MemorySource(str(where), entry.read(), 0)
    except FormatError as e:
        contents.problems.append(e)
    else:
        contents.libraries[entry.name] = map_source(where, source, request)


def _map_members(
    members: dict[str, Member],
    contents: Contents,
    request: MapRequest,
    jobs: int | None,
    on_done: OnDone | None,
) -> None:
    names = {member.path: name for name, member in members.items()}
    sizes = {member.path: member.size for member in members.values()}
    total, done = sum(sizes.values()), 0
    for mapped in map_libraries(tuple(members.values()), request, None, jobs):
        contents.libraries[names[mapped.path]] = mapped
        done += sizes[mapped.path]
        if on_done is not None:
            on_done(done, total)
