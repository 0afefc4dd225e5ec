"""Many libraries to their maps or summaries: from the cache, or else read by several processes.

Processes and not threads: unpacking releases the GIL, but reading the tables does not, and both
take about the same time.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace as replace_fields

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.elf import HostElf, read_host_elf
from pytest_negativa.gpucode.files import read_tables
from pytest_negativa.gpucode.library import map_library, map_slimmed
from pytest_negativa.gpucode.slimmed import SLIMMED, has_marker
from pytest_negativa.gpucode.source import ByteSource, Stamp, open_source
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.archive import Member
from pytest_negativa.models.duplicates import CodeDigest, LibraryContent
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.slimmed import Removed
from pytest_negativa.models.summary import LibrarySummary
from pytest_negativa.storage.records import decode_map, encode_map

# Bytes. Reading a smaller file takes no longer than looking it up.
_MIN_CACHED_SIZE = 1 << 20
# Bytes. Starting a process costs more than reading this much.
_MIN_PARALLEL_SIZE = 32 << 20
# Bytes. Passing a task and its result to a process takes about as long as reading _TASK_COST.
_BATCH_SIZE = 4 << 20
_TASK_COST = 64 << 10


@dataclass(frozen=True, slots=True)
class MapRequest:
    """What to find out about each library.

    Attributes:
        scope: how much to read.
        devices: the devices that the ``loaded`` figures of the summaries are for.
        with_map: whether the results have maps.
        with_summary: whether results from the cache have summaries; others always have.
        with_digest: whether the maps of libraries with GPU code hold the digest of the file.
        slimmed: whether to read slimmed libraries, too, whose maps have addresses for offsets.
            Otherwise such a library is an error, unless no GPU code is left.
        with_content: whether the results of libraries with GPU code have digests of their content.
        any_file: whether to read archives and files that are GPU code themselves, too. Otherwise
            each is an error.
    """

    scope: Scope
    devices: tuple[ComputeCapability, ...] = ()
    with_map: bool = False
    with_summary: bool = True
    with_digest: bool = False
    slimmed: bool = False
    with_content: bool = False
    any_file: bool = False


class MappedLibrary(NamedTuple):
    """The result for one library: ``error``, or what the request asks for.

    Attributes:
        path: the library's; that of a file in an archive is as if the archive were a folder.
        removed: what slim took out, of a slimmed library.
        content: see ``MapRequest.with_content``.
        cached: whether it came from the cache.
    """

    path: Path
    summary: LibrarySummary | None = None
    library_map: LibraryMap | None = None
    removed: Removed | None = None
    error: NegativaError | None = None
    cached: bool = False
    content: LibraryContent | None = None


def map_libraries(
    paths: Sequence[Path | Member],
    request: MapRequest,
    cache: MapCache | None = None,
    jobs: int | None = None,
    *,
    min_parallel_size: int = _MIN_PARALLEL_SIZE,
) -> Iterator[MappedLibrary]:
    """Map libraries and yield each when it is done, in no particular order.

    A library that can't be read yields its error and does not stop the others. Libraries in
    archives are never cached.

    Args:
        paths: files, and files in archives.
        jobs: how many processes; None: one for each processor that this process may use.
        min_parallel_size: bytes of libraries that one process reads alone.
    """
    # The largest first: otherwise one process could read it alone at the end.
    paths = sorted(paths, key=_size, reverse=True)
    known: dict[Path | Member, _Tables | None] = dict.fromkeys(paths)
    workers = _workers(paths, jobs, min_parallel_size)
    if workers > 1:
        for path in paths:
            found = _look_up_alone(path, request, cache)
            if isinstance(found, MappedLibrary):
                yield found
                del known[path]
            else:
                known[path] = found
        workers = _workers(list(known), jobs, min_parallel_size)
    if workers > 1:
        yield from _read_in_processes(known, request, cache, workers)
    else:
        for path, tables in known.items():
            yield _map(path, request, cache, tables)


def _workers(paths: Sequence[Path | Member], jobs: int | None, min_parallel_size: int) -> int:
    """How many processes are worth their start if all of ``paths`` must be read."""
    if sum(map(_size, paths[1:])) <= min_parallel_size:
        return 1
    return min(jobs or len(os.sched_getaffinity(0)), len(paths))


def _read_in_processes(
    known: Mapping[Path | Member, _Tables | None],
    request: MapRequest,
    cache: MapCache | None,
    workers: int,
) -> Iterator[MappedLibrary]:
    # These take 20 ms to import, which a single library does not need.
    import concurrent.futures
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool

    # fork would copy the locks that threads of the calling program hold.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_follow_parent
    )
    others = set(multiprocessing.active_children())
    done = False
    try:
        pending = {
            pool.submit(_map_encoded, batch, request, cache): batch for batch in _batches(known)
        }
        for future in concurrent.futures.as_completed(pending):
            batch = pending.pop(future)
            try:
                results = future.result()
            except BrokenProcessPool:
                # The pool does not tell which library the dead process was reading.
                problem = "not read: a process died (out of memory?); try --jobs 1"
                for path in map(_path_of, batch):
                    yield MappedLibrary(path, error=FormatError(path, None, problem))
                continue
            for mapped, encoded in results:
                if encoded is not None:
                    mapped = mapped._replace(library_map=decode_map(encoded, str(mapped.path)))
                yield mapped
        done = True
    finally:
        if not done:
            # A user who interrupts should not wait for large libraries.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
        pool.shutdown(cancel_futures=True)


def _batches(
    known: Mapping[Path | Member, _Tables | None],
) -> Iterator[dict[Path | Member, _Tables | None]]:
    """Tasks for the processes: a large file alone, small ones together."""
    batch: dict[Path | Member, _Tables | None] = {}
    size = 0
    for path, tables in known.items():
        batch[path] = tables
        size += _size(path) + _TASK_COST
        if size >= _BATCH_SIZE:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _follow_parent() -> None:
    """Let the program alone decide when a worker ends; without it, a worker would stay."""
    # Ctrl-C goes to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _path_of(where: Path | Member) -> Path:
    return where.path if isinstance(where, Member) else where


def _size(path: Path | Member) -> int:
    if isinstance(path, Member):
        return path.size
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Tables(NamedTuple):
    """The ELF tables and the cache key of a library; valid while the file has this stamp."""

    stamp: Stamp
    host: HostElf
    key: str | None

    @classmethod
    def read(cls, source: ByteSource, request: MapRequest, cache: MapCache | None) -> _Tables:
        host = read_tables(source) if request.any_file else read_host_elf(source)
        key = None
        if cache is not None and source.size >= _MIN_CACHED_SIZE:
            key = cache.key(source, host.build_id)
        return cls(source.stamp, host, key)


def _look_up_alone(
    path: Path | Member, request: MapRequest, cache: MapCache | None
) -> MappedLibrary | _Tables | None:
    """Look a library up in the cache; on a miss, return the tables that were read for the key."""
    if cache is None or isinstance(path, Member) or request.with_content:
        return None
    if _size(path) < _MIN_CACHED_SIZE:
        return None
    try:
        with ByteSource(path) as source:
            _check_name(path, source)
            tables = _Tables.read(source, request, cache)
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
        library_map = cache.load_map(key, request.scope)
        if library_map is None or _lacks_digest(library_map, request):
            return None
        library_map = _as_wanted(_at_path(library_map, source.path), request)
        if request.with_summary:
            summary = summarize(library_map, request.devices)
    return MappedLibrary(
        path,
        summary=summary and replace_fields(summary, path=source.path),
        library_map=library_map if request.with_map else None,
        cached=True,
    )


def _check_name(path: Path, source: ByteSource) -> None:
    """Refuse a path that is not UTF-8, since JSON can't hold it."""
    try:
        source.path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise FormatError(shown, None, "not read: the path is not UTF-8; rename it") from None


def _at_path(library_map: LibraryMap, path: str) -> LibraryMap:
    """The map with the library's path of now; it may have moved since it was read."""
    return replace_fields(library_map, library=replace_fields(library_map.library, path=path))


def _lacks_digest(library_map: LibraryMap, request: MapRequest) -> bool:
    missing = library_map.library.sha256 is None and bool(library_map.sections)
    return request.with_digest and missing


def _as_wanted(library_map: LibraryMap, request: MapRequest) -> LibraryMap:
    """The map without its digest if only an earlier request asked for one."""
    if request.with_digest or library_map.library.sha256 is None:
        return library_map
    return replace_fields(library_map, library=replace_fields(library_map.library, sha256=None))


def _with_digest(library_map: LibraryMap, source: ByteSource) -> LibraryMap:
    """The map with the digest of the file; without if the file changed since it was opened."""
    sha256 = source.sha256()
    if not source.is_unchanged():
        return library_map
    return replace_fields(library_map, library=replace_fields(library_map.library, sha256=sha256))


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
        if request.with_content:
            return _with_content(path, source, request, cache, known)
        _check_name(path, source)
        if has_marker(source):
            return _read_slimmed(path, source, request)
        if known is None or known.stamp != source.stamp:
            known = _Tables.read(source, request, cache)
        return _look_up(path, source, known.key, request, cache) or _read(
            path, source, known, request, cache
        )
    except NegativaError as e:
        return MappedLibrary(path, error=e)


def _with_content(
    path: Path,
    source: ByteSource,
    request: MapRequest,
    cache: MapCache | None,
    known: _Tables | None,
) -> MappedLibrary:
    without = dataclasses.replace(request, with_map=True, with_content=False)
    mapped = map_source(path, source, without, cache, known)
    library_map = mapped.library_map
    if library_map is None or not library_map.sections:
        return mapped
    spans = [region.span for region in library_map.iter_regions()]
    spans += [frame.span for frame in library_map.iter_frames()]
    content = LibraryContent(
        path=source.path,
        size=source.size,
        sha256=source.sha256(),
        # The offsets in the map of a slimmed library are addresses.
        code=()
        if mapped.removed is not None
        else tuple(
            CodeDigest(span.size, hashlib.sha256(source.read(span.start, span.size)).digest())
            for span in spans
        ),
    )
    if not source.is_unchanged():
        raise FormatError(path, None, "changed while it was read; run the command again")
    return mapped._replace(library_map=library_map if request.with_map else None, content=content)


def _read(
    path: Path,
    source: ByteSource,
    tables: _Tables,
    request: MapRequest,
    cache: MapCache | None,
) -> MappedLibrary:
    library_map = None
    if request.with_digest and cache is not None and tables.key is not None:
        # An earlier request may have asked for the same without the digest.
        library_map = cache.load_map(tables.key, request.scope)
    if library_map is None:
        library_map = map_library(source, tables.host, request.scope)
    if _lacks_digest(library_map, request):
        library_map = _with_digest(_at_path(library_map, source.path), source)
    summary = summarize(library_map, request.devices)
    # Not if it changed while it was read: the map may be of neither file.
    if cache is not None and tables.key is not None and source.is_unchanged():
        cache.save(tables.key, library_map, summary)
    return MappedLibrary(path, summary, library_map if request.with_map else None)


def _read_slimmed(path: Path, source: ByteSource, request: MapRequest) -> MappedLibrary:
    """Read a slimmed library. It is never cached: little is left to read."""
    library_map, removed = map_slimmed(source, request.scope)
    if not request.slimmed and (library_map.sections or library_map.problems):
        raise FormatError(path, None, SLIMMED)
    if _lacks_digest(library_map, request):
        library_map = _with_digest(library_map, source)
    summary = summarize(library_map, request.devices)
    return MappedLibrary(path, summary, library_map if request.with_map else None, removed)


def _map_encoded(
    batch: Mapping[Path | Member, _Tables | None], request: MapRequest, cache: MapCache | None
) -> list[tuple[MappedLibrary, bytes | None]]:
    """Map in a worker process; JSON crosses to the parent faster than pickled records."""
    # Maps are trees of a hundred thousand records without cycles: nothing to collect.
    gc.disable()
    results: list[tuple[MappedLibrary, bytes | None]] = []
    for path, known in batch.items():
        mapped = _map(path, request, cache, known)
        encoded = None if mapped.library_map is None else encode_map(mapped.library_map)
        results.append((mapped._replace(library_map=None), encoded))
    return results
