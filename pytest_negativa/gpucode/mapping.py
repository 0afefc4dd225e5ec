"""Many libraries to their maps or summaries: from the cache first, the rest in processes.

Processes and not threads: unpacking releases the GIL, but reading the tables does not, and
the two take about equally long.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.library import read_library, read_slimmed
from pytest_negativa.gpucode.slimmed import SLIMMED, is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.slimmed import Removed
from pytest_negativa.models.summary import LibrarySummary
from pytest_negativa.storage.records import decode_map, encode_map

# Reading a smaller file takes no longer than looking it up.
_MIN_CACHED_SIZE = 1 << 20
# Starting a process costs more than reading this much.
_MIN_PARALLEL_SIZE = 32 << 20


@dataclass(frozen=True, slots=True)
class MapRequest:
    """What is wanted of each library.

    Attributes:
        scope: how much to read.
        device: for the ``loaded`` figures of the summaries.
        with_map: whether the maps are wanted.
        with_summary: whether the summaries are.
        with_digest: whether the maps of libraries with GPU code hold the digest of the file.
        slimmed: whether slimmed libraries are read, too, whose maps have addresses for offsets.
            Otherwise such a library is an error, unless no GPU code is left.
    """

    scope: Scope
    device: ComputeCapability | None = None
    with_map: bool = False
    with_summary: bool = True
    with_digest: bool = False
    slimmed: bool = False


@dataclass(frozen=True, slots=True)
class MappedLibrary:
    """What came of one library: ``error``, or what was asked for of it.

    ``removed`` is of slimmed libraries.
    """

    path: Path
    summary: LibrarySummary | None = None
    library_map: LibraryMap | None = None
    removed: Removed | None = None
    error: NegativaError | None = None
    cached: bool = False


def map_libraries(
    paths: Sequence[Path],
    request: MapRequest,
    cache: MapCache | None = None,
    jobs: int | None = None,
) -> Iterator[MappedLibrary]:
    """Map ``paths``, yielding each as soon as it is done, in no particular order.

    A library that can't be read yields its error and stops no other one. ``jobs`` is the
    number of processes; the default is one for each processor this process may use.
    """
    missing: list[tuple[int, Path]] = []
    for path in paths:
        found = _look_up(path, request, cache)
        if found is not None:
            yield found
        else:
            missing.append((_size(path), path))
    # The largest first, so that none is left to run alone at the end.
    missing.sort(key=lambda item: item[0], reverse=True)
    workers = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    large = sum(size for size, _ in missing[1:]) > _MIN_PARALLEL_SIZE
    if workers < 2 or not large:
        for _, path in missing:
            yield _read(path, request, cache)
        return
    yield from _read_in_processes([path for _, path in missing], request, cache, workers)


def _read_in_processes(
    paths: Sequence[Path], request: MapRequest, cache: MapCache | None, workers: int
) -> Iterator[MappedLibrary]:
    # These take 20 ms to import, in vain for a single library.
    import concurrent.futures
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool

    # fork would copy the locks of whatever threads the calling program runs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_leave_interrupts
    ) as pool:
        pending = {pool.submit(_read_encoded, path, request, cache): path for path in paths}
        try:
            for future in concurrent.futures.as_completed(pending):
                try:
                    mapped, encoded = future.result()
                except BrokenProcessPool:
                    # Which library did it is not told: the one read when memory ran out, or any.
                    problem = "not read: a process died (out of memory?); try --jobs 1"
                    path = pending[future]
                    yield MappedLibrary(path, error=FormatError(path, None, problem))
                    continue
                if encoded is not None:
                    mapped = replace(mapped, library_map=decode_map(encoded, str(mapped.path)))
                yield mapped
        finally:
            for waiting in pending:
                waiting.cancel()


def _leave_interrupts() -> None:
    # Ctrl-C goes to the whole group; the process that started the others ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _look_up(path: Path, request: MapRequest, cache: MapCache | None) -> MappedLibrary | None:
    try:
        _check_name(path)
        key = _cache_key(path, cache)
    except NegativaError as e:
        return MappedLibrary(path, error=e)
    if cache is None or key is None:
        return None
    real_path = os.path.realpath(path)
    summary = None if request.with_map else cache.load_summary(key, request.scope, request.device)
    library_map = None
    if summary is None:
        library_map = cache.load_map(key, request.scope)
        if library_map is None or _lacks_digest(library_map, request):
            return None
        library_map = _as_wanted(_at_path(library_map, real_path), request)
        if request.with_summary:
            summary = summarize(library_map, request.device)
    return MappedLibrary(
        path,
        summary=summary and replace_fields(summary, path=real_path),
        library_map=library_map if request.with_map else None,
        cached=True,
    )


def _cache_key(path: Path, cache: MapCache | None) -> str | None:
    if cache is None or _size(path) < _MIN_CACHED_SIZE:
        return None
    with ByteSource(path) as source:
        return cache.key(source)


def _check_name(path: Path) -> None:
    """A map holds the path as JSON, which is UTF-8; a file name on Linux may be any bytes."""
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise FormatError(shown, None, "not read: the path is not UTF-8; rename it") from None


def _at_path(library_map: LibraryMap, path: str) -> LibraryMap:
    """The map of a library that lay elsewhere when it was read."""
    return replace_fields(library_map, library=replace_fields(library_map.library, path=path))


def _lacks_digest(library_map: LibraryMap, request: MapRequest) -> bool:
    missing = library_map.library.sha256 is None and bool(library_map.sections)
    return request.with_digest and missing


def _as_wanted(library_map: LibraryMap, request: MapRequest) -> LibraryMap:
    """Without a digest that somebody else had asked for."""
    if request.with_digest or library_map.library.sha256 is None:
        return library_map
    return replace_fields(library_map, library=replace_fields(library_map.library, sha256=None))


def _with_digest(library_map: LibraryMap, source: ByteSource) -> LibraryMap:
    """With the digest of the file; as it was if the file changed since ``source`` was opened."""
    sha256 = source.sha256()
    if not source.is_unchanged():
        return library_map
    return replace_fields(library_map, library=replace_fields(library_map.library, sha256=sha256))


def _read(path: Path, request: MapRequest, cache: MapCache | None) -> MappedLibrary:
    if is_slimmed(path):
        return _read_slimmed(path, request)
    try:
        key = _cache_key(path, cache)
        with ByteSource(path) as source:
            library_map = None
            if request.with_digest and cache is not None and key is not None:
                # Somebody may have asked for the same without the digest.
                library_map = cache.load_map(key, request.scope)
            if library_map is None:
                library_map = read_library(path, request.scope)
            if _lacks_digest(library_map, request):
                library_map = _with_digest(library_map, source)
    except NegativaError as e:
        return MappedLibrary(path, error=e)
    summary = summarize(library_map, request.device)
    if cache is not None and key is not None:
        # Not if it changed while it was read: the map may be of neither file.
        with contextlib.suppress(NegativaError):
            if _cache_key(path, cache) == key:
                cache.save(key, library_map, summary)
    return MappedLibrary(path, summary, library_map if request.with_map else None)


def _read_slimmed(path: Path, request: MapRequest) -> MappedLibrary:
    """Not kept in the cache: what is left is read fast, and an entry has no place for the rest."""
    try:
        library_map, removed = read_slimmed(path, request.scope)
        if not request.slimmed and (library_map.sections or library_map.problems):
            raise FormatError(path, None, SLIMMED)
        if _lacks_digest(library_map, request):
            with ByteSource(path) as source:
                library_map = _with_digest(library_map, source)
    except NegativaError as e:
        return MappedLibrary(path, error=e)
    summary = summarize(library_map, request.device)
    return MappedLibrary(path, summary, library_map if request.with_map else None, removed)


def _read_encoded(
    path: Path, request: MapRequest, cache: MapCache | None
) -> tuple[MappedLibrary, bytes | None]:
    """In a worker: JSON crosses the process boundary faster than pickled records."""
    # Maps are trees of a hundred thousand records without cycles: nothing to collect.
    gc.disable()
    mapped = _read(path, request, cache)
    if mapped.library_map is None:
        return mapped, None
    return replace(mapped, library_map=None), encode_map(mapped.library_map)
