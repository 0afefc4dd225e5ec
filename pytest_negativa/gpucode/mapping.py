"""Libraries to maps: cache from 1 MiB, processes from 32 MiB on, batches; slimmed ones refused.

Processes and not threads: unpacking releases the GIL, but reading the tables does not, and both
take about the same time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import FormatError, NegativaError, WorkerError
from pytest_negativa.gpucode.elf import HostElf, read_host_elf
from pytest_negativa.gpucode.files import read_tables
from pytest_negativa.gpucode.library import map_library, map_slimmed
from pytest_negativa.gpucode.slimmed import SLIMMED
from pytest_negativa.gpucode.source import ByteSource, open_source
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.gpucode.workers import (
    LocalProcesses,
    Lost,
    Workers,
    run_tasks,
)
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.library import (
    LibraryMap,
    Removed,
    Scope,
)
from pytest_negativa.models.summary import LibrarySummary
from pytest_negativa.storage.records import decode_map, encode_record

if TYPE_CHECKING:
    from pytest_negativa.gpucode.cache import MapCache

# Bytes. Reading a smaller file takes no longer than looking it up.
_MIN_CACHED_SIZE = 1 << 20
# Bytes. Starting a process costs more than reading this much.
_MIN_PARALLEL_SIZE = 32 << 20
# Bytes. Passing a task and its result to a process takes about as long as reading _TASK_COST.
_BATCH_SIZE = 4 << 20
_TASK_COST = 64 << 10


@dataclass(frozen=True, slots=True)
class MapRequest:
    """Facts that a caller asks for about each library.

    Attributes:
        scope: how much to read.
        left_scope: the same for slimmed libraries; None: ``scope``.
        devices: the devices that the ``loaded`` figures of the summaries are for.
        with_map: whether the results have maps.
        with_summary: whether results from the cache have summaries; others always have.
        with_digest: whether the maps of libraries with GPU code hold the digest of the file; or the
            sizes in bytes of the files for which they do.
        slimmed: whether to read slimmed libraries, too, whose maps have addresses for offsets.
            Otherwise such a library is an error, unless no GPU code is left.
        any_file: whether to read archives and files that are GPU code themselves, too. Otherwise
            each is an error.
    """

    scope: Scope
    devices: tuple[ComputeCapability, ...] = ()
    with_map: bool = False
    with_summary: bool = True
    with_digest: bool | frozenset[int] = False
    slimmed: bool = False
    left_scope: Scope | None = None
    any_file: bool = False

    def wants_digest(self, size: int) -> bool:
        """Whether the map of a file of so many bytes is to hold its digest."""
        if isinstance(self.with_digest, bool):
            return self.with_digest
        return size in self.with_digest


OnDone = Callable[[int, int], None]
"""Called with the bytes of the libraries that are done, and of all."""


class MappedLibrary(NamedTuple):
    """The result for one library: ``error``, or what the request asks for.

    Attributes:
        path: the library's; that of a file in an archive is as if the archive were a folder.
        removed: what slim took out, of a slimmed library.
        cached: whether it came from the cache.
    """

    path: Path
    summary: LibrarySummary | None = None
    library_map: LibraryMap | None = None
    removed: Removed | None = None
    error: NegativaError | None = None
    cached: bool = False

    def at(self, path: Path) -> MappedLibrary:
        """The same for another name of the file."""
        if path == self.path or self.error is not None:
            return self
        library_map, shown = self.library_map, str(path)
        if library_map is not None:
            library_map = _at_file(library_map, shown, library_map.library.mtime_ns)
        return self._replace(
            path=path,
            summary=self.summary and replace(self.summary, path=shown),
            library_map=library_map,
        )


def map_libraries(
    paths: Sequence[Path | Member],
    request: MapRequest,
    cache: MapCache | None = None,
    workers: Workers | None = None,
    on_done: OnDone | None = None,
    *,
    min_parallel_size: int = _MIN_PARALLEL_SIZE,
) -> Iterator[MappedLibrary]:
    """Map libraries and yield each when it is done, in no particular order.

    A library that can't be read yields its error and does not stop the others. Libraries in
    archives are never cached.

    Args:
        paths: files, and files in archives.
        workers: who reads; None: a process for each processor that this process may use.
        min_parallel_size: bytes of libraries that this process reads alone. A cluster reads all.

    Raises:
        WorkerError: a cluster can't be reached, or one of its workers can't do its part.
    """
    files = _Files(paths)
    sizes = {_path_of(where): files.size(where) for where in files.seen}
    total, done = sum(sizes.values()), 0
    if on_done is not None:
        on_done(0, total)
    for mapped in _map_files(files, request, cache, workers or LocalProcesses(), min_parallel_size):
        done += sizes[mapped.path]
        if on_done is not None:
            on_done(done, total)
        yield mapped


def _map_files(
    files: _Files,
    request: MapRequest,
    cache: MapCache | None,
    workers: Workers,
    min_parallel_size: int,
) -> Iterator[MappedLibrary]:
    known: dict[Path | Member, _Tables | None] = dict.fromkeys(files.largest_first)
    if files.are_worth(known, min_parallel_size):
        for path in filter(files.is_large, files.largest_first):
            found = _look_up_alone(path, request, cache)
            if isinstance(found, MappedLibrary):
                del known[path]
                yield found
            else:
                known[path] = found
    is_worth = files.are_worth(known, min_parallel_size) and workers.count(len(known)) > 1
    is_shared = bool(known) and (workers.are_remote or is_worth)
    if is_shared:
        yield from _read_by_workers(files, known, request, cache, workers)
    else:
        yield from (_map(path, request, cache, tables) for path, tables in known.items())


def _state_at(where: Path | Member) -> FileState | None:
    """The state of a file before it is read; None if it can't be seen, or is no regular file."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(where.archive if isinstance(where, Member) else where)  # noqa: PTH116
        return FileState.of(status) if stat.S_ISREG(status.st_mode) else None
    return None


class _Files:
    """The files to map.

    Attributes:
        seen: all files.
        largest_first: otherwise one process could read the largest alone at the end.
    """

    def __init__(self, paths: Iterable[Path | Member]) -> None:
        self.seen = {path: _state_at(path) for path in paths}
        self.largest_first = sorted(self.seen, key=self.size, reverse=True)

    def size(self, path: Path | Member) -> int:
        if isinstance(path, Member):
            return path.size
        seen = self.seen[path]
        return 0 if seen is None else seen.size

    def is_large(self, path: Path | Member) -> bool:
        """Whether reading the file takes longer than looking it up."""
        return self.size(path) >= _MIN_CACHED_SIZE

    def are_worth(self, paths: Iterable[Path | Member], min_size: int) -> bool:
        """Whether they are worth the start of processes."""
        sizes = [self.size(path) for path in paths]
        return sum(sizes) - max(sizes, default=0) > min_size


def _read_by_workers(
    files: _Files,
    known: Mapping[Path | Member, _Tables | None],
    request: MapRequest,
    cache: MapCache | None,
    workers: Workers,
) -> Iterator[MappedLibrary]:
    batches = tuple(_batches(files, known))
    map_batch = partial(_map_batch, request, cache)
    for batch, answers in run_tasks(workers, map_batch, batches, len(batches)):
        if isinstance(answers, Lost):
            for where in batch:
                path = _path_of(where)
                yield MappedLibrary(path, error=FormatError(path, None, f"not read: {answers}"))
            continue
        for where, (mapped, seen, encoded) in zip(batch, answers, strict=True):
            if workers.are_remote and not _are_alike(seen, files.seen[where]):
                is_same = _state_at(where) == files.seen[where]
                here = _map(where, request, cache)
                # Else the file is damaged, or changed since the task began.
                if is_same and here.error is None:
                    raise WorkerError(
                        f"{mapped.path}: a worker has another file there, or none; share the "
                        "folder, so that all workers have the same files at the same paths"
                    )
                mapped = here
            elif encoded is not None:
                mapped = mapped._replace(library_map=decode_map(encoded, str(mapped.path)))
            yield mapped


def _are_alike(one: FileState | None, other: FileState | None) -> bool:
    """Whether files of two machines are the same; file systems of a network round times."""
    states = ((s.size, s.mtime_ns // 10**9) if s is not None else None for s in (one, other))
    return len({*states}) == 1


_Batch = dict[Path | Member, "_Tables | None"]


def _batches(files: _Files, known: Mapping[Path | Member, _Tables | None]) -> Iterator[_Batch]:
    """Tasks for workers: a large file alone, small ones together."""
    batch: _Batch = {}
    size = 0
    for path, tables in known.items():
        batch[path] = tables
        size += files.size(path) + _TASK_COST
        if size >= _BATCH_SIZE:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _path_of(where: Path | Member) -> Path:
    return where.path if isinstance(where, Member) else where


class _Tables(NamedTuple):
    """The ELF tables and the cache key of a library; valid while the file has this state."""

    state: FileState
    host: HostElf
    key: str | None  # None of slimmed libraries, too: little is left to read

    @classmethod
    def read(
        cls, path: Path, source: ByteSource, request: MapRequest, cache: MapCache | None
    ) -> _Tables:
        try:
            source.path.encode()  # JSON holds it.
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise FormatError(shown, None, "not read: the path is not UTF-8; rename it") from None
        host = read_tables(source) if request.any_file else read_host_elf(source)
        key = None
        if cache is not None and source.size >= _MIN_CACHED_SIZE and host.marker is None:
            key = cache.key(source, host.build_id)
        return cls(source.state, host, key)


def _look_up_alone(
    path: Path | Member, request: MapRequest, cache: MapCache | None
) -> MappedLibrary | _Tables | None:
    """Look a library up in the cache; on a miss, return the tables that were read for the key."""
    if cache is None or isinstance(path, Member):
        return None
    try:
        with ByteSource(path) as source:
            tables = _Tables.read(path, source, request, cache)
            return _look_up(path, source, tables.key, request, cache) or tables
    except NegativaError as e:
        return MappedLibrary(path, error=e)


def _look_up(
    path: Path, source: ByteSource, key: str | None, request: MapRequest, cache: MapCache | None
) -> MappedLibrary | None:
    if cache is None or key is None:
        return None
    summary = None if request.with_map else cache.load_summary(key, request.scope, request.devices)
    library_map = None
    if summary is None:
        with_digest = request.wants_digest(source.size)
        library_map = cache.load_map(key, request.scope, with_digest=with_digest)
        if library_map is None:
            return None
        library_map = _at_file(library_map, source.path, source.mtime_ns)
        if request.with_summary:
            summary = summarize(library_map, request.devices)
    return MappedLibrary(
        path,
        summary=summary and replace(summary, path=source.path),
        library_map=library_map if request.with_map else None,
        cached=True,
    )


def _at_file(library_map: LibraryMap, path: str, mtime_ns: int) -> LibraryMap:
    """The map with path and time of a file with the same content; it may have moved, too."""
    library = replace(library_map.library, path=path, mtime_ns=mtime_ns)
    return replace(library_map, library=library)


def _map(
    where: Path | Member, request: MapRequest, cache: MapCache | None, known: _Tables | None = None
) -> MappedLibrary:
    """Open a library, and look it up or read it.

    Args:
        known: its tables, if they were read before.
    """
    path = _path_of(where)
    try:
        with open_source(where) as source:
            cache = cache if isinstance(where, Path) else None
            return map_source(path, source, request, cache, known)
    except NegativaError as e:
        return MappedLibrary(path, error=e)


def map_source(
    path: Path,
    source: ByteSource,
    request: MapRequest,
    cache: MapCache | None = None,
    known: _Tables | None = None,
) -> MappedLibrary:
    """Look up or read a library that is open; its tables are read once.

    Args:
        path: of the result.
        known: its tables, if they were read before.
    """
    try:
        if known is None or known.state != source.state:
            known = _Tables.read(path, source, request, cache)
        if found := _look_up(path, source, known.key, request, cache):
            return found
        host, removed = known.host, None
        if host.marker is None:
            library_map = map_library(source, host, request.scope)
        else:
            library_map, removed = map_slimmed(source, host, request.left_scope or request.scope)
            if not request.slimmed and (library_map.sections or library_map.problems):
                raise FormatError(path, None, SLIMMED)
        if library_map.sections and request.wants_digest(source.size):
            sha256 = source.sha256()
            # If it changed while it was read, the digest may be of another file than the map.
            library = replace(library_map.library, sha256=sha256 if source.is_unchanged() else None)
            library_map = replace(library_map, library=library)
        summary = summarize(library_map, request.devices)
        # Not if it changed while it was read: the map may be of neither file.
        if cache is not None and known.key is not None and source.is_unchanged():
            with_digest = request.wants_digest(source.size)
            cache.save(known.key, library_map, summary, with_digest=with_digest)
        return MappedLibrary(path, summary, library_map if request.with_map else None, removed)
    except NegativaError as e:
        return MappedLibrary(path, error=e)


def _map_batch(
    request: MapRequest, cache: MapCache | None, batch: _Batch
) -> list[tuple[MappedLibrary, FileState | None, bytes | None]]:
    """Map in a worker: each result, the state of the file there, and the encoded map.

    JSON crosses to the parent faster than pickled records.
    """
    # Maps are trees of a hundred thousand records without cycles: nothing to collect.
    gc.disable()
    answers: list[tuple[MappedLibrary, FileState | None, bytes | None]] = []
    try:
        for where, known in batch.items():
            seen, mapped = _state_at(where), _map(where, request, cache, known)
            encoded = None if mapped.library_map is None else encode_record(mapped.library_map)
            answers.append((mapped._replace(library_map=None), seen, encoded))
    finally:
        # The process of a cluster has other tasks, too.
        gc.enable()
    return answers
