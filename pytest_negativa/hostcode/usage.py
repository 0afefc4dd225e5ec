"""Logs of touched pages to a ``HostUsage``, and the union of several.

A library is one by its content. The union is that of sets, so its order does not matter.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_LOAD
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.page_logs import LoggedLibrary, LoggedProcess
from pytest_negativa.models.hostcode import (
    HOST_USAGE_VERSION,
    FileKey,
    HostFile,
    HostLibrary,
    HostUsage,
)
from pytest_negativa.models.spans import PAGE_SIZE, Span, intersection, minus, size, union
from pytest_negativa.models.trace import FileState
from pytest_negativa.settings.globs import PathRules

UNWATCHED = "its sections can't be read, its code is relocated, or another file was at its path"
"""Reason for which a library could not be traced."""


class FilePages(NamedTuple):
    """Pages of one file that all processes watched and touched, in addresses of the ELF file.

    Attributes:
        ranges: first and end address of what was watched.
        touched: addresses of pages.
        watched: whether all processes watched it.
        unread: ranges of constants that no process had in memory.
    """

    ranges: frozenset[tuple[int, int]]
    touched: frozenset[int]
    watched: bool
    unread: tuple[Span, ...] = ()


def unite_logs(processes: Iterable[LoggedProcess]) -> dict[FileKey, FilePages]:
    """Unite the pages that all processes touched, by file."""
    logged: dict[FileKey, list[LoggedLibrary]] = defaultdict(list)
    constants: dict[FileKey, list[LoggedLibrary]] = defaultdict(list)
    for process in processes:
        for one in process.libraries:
            logged[one.file].append(one)
        for one in process.constants:
            constants[one.file].append(one)
    return {
        key: FilePages(
            frozenset().union(*(one.ranges for one in group)),
            frozenset().union(*(one.pages for one in group)),
            all(one.watched for one in group),
            _unread(constants[key]),
        )
        for key, group in logged.items()
    }


def _unread(constants: Sequence[LoggedLibrary]) -> tuple[Span, ...]:
    """The constants that no process had in memory; none, if one ended without saying so."""
    if not all(one.watched for one in constants):
        return ()
    read = union((page, page + PAGE_SIZE) for one in constants for page in one.pages)
    return tuple(minus(union(span for one in constants for span in one.ranges), read))


def identify(
    key: FileKey, digests: Mapping[tuple[str, FileState], str | None] = MappingProxyType({})
) -> HostFile | str:
    """Read the content of a file, or tell why it is not known.

    Args:
        key: the file as it was when a process loaded it.
        digests: SHA-256 of files, by path and state; a file that has changed since is read again.
    """
    name = os.fsencode(key.path).decode("utf-8", "backslashreplace")
    if name != key.path:
        return f"{name}: its path is not UTF-8, and the files of a run can't hold it"
    try:
        with ByteSource(key.path) as source:
            status = os.fstat(source.fileno())
            if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != key[1:]:
                return f"{key.path}: was replaced after it was loaded"
            elf = read_host_elf(source)
            segments = tuple(
                (segment.p_vaddr, segment.p_offset, segment.p_filesz)
                for segment in elf.segments
                if segment.p_type == PT_LOAD
            )
            # To hash a library takes longer than the rest.
            state = (*key[1:], status.st_ctime_ns)
            sha256 = digests.get((key.path, state)) or source.sha256()
            if not source.is_unchanged():
                return f"{key.path}: changed while it was read"
    except FormatError as e:
        return str(e)
    return HostFile(
        file=key,
        sha256=sha256,
        build_id=elf.build_id,
        segments=segments,
    )


def describe(file: HostFile, pages: FilePages) -> HostLibrary:
    """Convert the addresses of a file's pages to file offsets."""
    return HostLibrary(
        sha256=file.sha256,
        size=file.file.size,
        build_id=file.build_id,
        paths=(file.original or file.file.path,),
        watched=_offsets(file, pages.ranges),
        touched=_offsets(file, ((page, page + PAGE_SIZE) for page in pages.touched)),
        unwatched=None if pages.watched else UNWATCHED,
        unread=_offsets(file, pages.unread),
    )


def _offsets(file: HostFile, addresses: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """File offsets of the bytes at some addresses."""
    spans = union(addresses)
    found = [
        Span(first - start + offset, last - start + offset)
        for start, offset, length in file.segments
        for first, last in intersection([(start, start + length)], spans)
    ]
    if size(found) < size(spans):
        raise NegativaError(f"{file.file.path}: no segment holds all addresses that were watched")
    return union(found)


def unite(usages: Sequence[HostUsage]) -> HostUsage:
    """Union of what several runs touched; each library once."""
    by_content: dict[str, list[HostLibrary]] = defaultdict(list)
    for usage in usages:
        for library in usage.libraries:
            by_content[library.sha256].append(library)
    processors = {processor for usage in usages for processor in usage.processors}
    return HostUsage(
        format_version=HOST_USAGE_VERSION,
        processors=tuple(sorted(processors, key=lambda p: (p.model, p.flags))),
        # A run may have been gathered before all of its processes began.
        processes={
            run_id: max(usage.processes.get(run_id, 0) for usage in usages)
            for run_id in sorted({run_id for usage in usages for run_id in usage.processes})
        },
        libraries=tuple(
            sorted(map(_unite_libraries, by_content.values()), key=lambda x: (x.paths, x.sha256))
        ),
        incomplete=tuple(sorted({text for usage in usages for text in usage.incomplete})),
        failed=tuple(sorted({text for usage in usages for text in usage.failed})),
        chosen=tuple(sorted({text for usage in usages for text in usage.chosen})),
    )


def with_paths(library: HostLibrary, paths: PathRules) -> HostLibrary:
    """The library with the paths that it has here."""
    return replace(library, paths=tuple(sorted({paths.apply(path) for path in library.paths})))


def _unite_libraries(group: Sequence[HostLibrary]) -> HostLibrary:
    unread: Iterable[Span] = group[0].unread
    for one in group[1:]:
        unread = intersection(unread, one.unread)
    return HostLibrary(
        sha256=group[0].sha256,
        size=group[0].size,
        build_id=group[0].build_id,
        paths=tuple(sorted({path for one in group for path in one.paths})),
        watched=union(span for one in group for span in one.watched),
        touched=union(span for one in group for span in one.touched),
        unwatched=next((one.unwatched for one in group if one.unwatched is not None), None),
        unread=tuple(unread),
    )
