"""Touched pages of a run's processes: united by content, what was not watched or recorded.

Of CPU code, a library is one by its content. The union is that of sets, so its order does not
matter. Of GPU code, a page that no process touched is a witness only if each process that had the
library mapped watched it, to its end.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import FormatError, NegativaError, StoreError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_LOAD
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.pages import (
    FileKey,
    HostFile,
    HostFiles,
    HostLibrary,
    HostUsage,
)
from pytest_negativa.models.spans import PAGE_SIZE, Span, common, intersection, minus, size, union
from pytest_negativa.models.trace import LibraryUsage, Usage
from pytest_negativa.pages.page_logs import (
    LoggedLibrary,
    count_lost,
    read_page_logs,
)
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.records import load_if_there, load_record, write_record
from pytest_negativa.storage.results import load_digests, load_usage
from pytest_negativa.storage.runs import Run

UNWATCHED = (
    "its sections can't be read, its code is relocated or has restartable sequences, or another "
    "file was at its path"
)
"""Reason for which a library could not be traced."""

# The tracer writes its records with it, other ones in a proof than in a traced run.
_OF_THE_TRACER = os.path.realpath(msgspec._core.__file__)


def unite_logs(logs: Iterable[LoggedLibrary]) -> dict[FileKey, LoggedLibrary]:
    """What all processes watched and touched of each file, watched if each of them did so."""
    logged: dict[FileKey, list[LoggedLibrary]] = defaultdict(list)
    for one in logs:
        logged[one.file].append(one)
    return {
        key: LoggedLibrary(
            key,
            all(one.watched for one in group),
            tuple(set().union(*(one.ranges for one in group))),
            tuple(set().union(*(one.pages for one in group))),
        )
        for key, group in logged.items()
    }


def identify(
    key: FileKey, digests: Mapping[tuple[str, FileState | None], str | None] = MappingProxyType({})
) -> HostFile | str:
    """Read the content of a file, or tell why it is not known.

    Args:
        key: the file as it was when a process loaded it.
        digests: SHA-256 of files, by path and state; a file that has changed since is read again.
    """
    if not key.path:
        return "a library was gone from its path when it was loaded"
    name = os.fsencode(key.path).decode("utf-8", "backslashreplace")
    if name != key.path:
        return f"{name}: its path is not UTF-8, and the files of a run can't hold it"
    try:
        with ByteSource(key.path) as source:
            if FileKey.of(key.path, source.state) != key:
                return f"{key.path}: was replaced after it was loaded"
            elf = read_host_elf(source)
            segments = tuple(
                (segment.p_vaddr, segment.p_offset, segment.p_filesz)
                for segment in elf.segments
                if segment.p_type == PT_LOAD
            )
            # To hash a library takes longer than the rest.
            sha256 = digests.get((key.path, source.state)) or source.sha256()
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


def describe(
    file: HostFile, code: LoggedLibrary, constants: LoggedLibrary | None = None
) -> HostLibrary:
    """Convert the addresses of a file's pages to file offsets.

    Args:
        file: what was loaded.
        code: what all processes watched and touched of its code.
        constants: pages of its data that were in memory, if any process noted them.
    """
    path = file.original or file.file.path
    unwatched = None if code.watched else UNWATCHED
    unread: Iterable[Span] = ()
    # If a process ended without noting them, it may have read all.
    if constants is not None and constants.watched:
        unread = minus(union(constants.ranges), _pages(constants))
    return HostLibrary(
        sha256=file.sha256,
        size=file.file.size,
        build_id=file.build_id,
        paths=(path,),
        watched=_offsets(file, code.ranges),
        touched=_offsets(file, _pages(code)),
        unwatched="the tracer uses it, too" if path == _OF_THE_TRACER else unwatched,
        unread=_offsets(file, unread),
    )


def _pages(logged: LoggedLibrary) -> tuple[Span, ...]:
    return union((page, page + PAGE_SIZE) for page in logged.pages)


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
    return HostUsage(
        processors=tuple(sorted({model for usage in usages for model in usage.processors})),
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


def _unite_libraries(group: Sequence[HostLibrary]) -> HostLibrary:
    return HostLibrary(
        sha256=group[0].sha256,
        size=group[0].size,
        build_id=group[0].build_id,
        paths=tuple(sorted({path for one in group for path in one.paths})),
        watched=union(span for one in group for span in one.watched),
        touched=union(span for one in group for span in one.touched),
        unwatched=next((one.unwatched for one in group if one.unwatched is not None), None),
        unread=common(one.unread for one in group),
    )


_WHAT = "a trace of CPU code", "trace again"
_ADDED = "added-{}.json"  # beside the logs


def gather(run: Run, known_files: Iterable[HostFile] = ()) -> HostUsage | None:
    """Write and return what the run's processes have touched so far; None without a trace.

    Code runs until a process is gone, so call it again rather than reading ``cpu.json``.

    Args:
        known_files: files that need not be read, beside those of the run.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a file can't be read or written.
    """
    if not run.page_log_files.exists():
        return load_if_there(run.host_usage_file, HostUsage, *_WHAT)
    record = load_files(run)
    known = {f.file: f for f in (*known_files, *record.files)}
    processes = read_page_logs(run.page_logs)
    pages = unite_logs(one for process in processes for one in process.libraries)
    constants = unite_logs(one for process in processes for one in process.constants)
    incomplete: list[str] = []
    if lost := count_lost(run.page_logs):
        incomplete.append(f"{lost:,} loads of libraries were not recorded (is the disk full?)")
    if (failure := run.failure) is not None:
        incomplete.append(f"{run.run_id} failed: {failure}")
    failed, chosen = (
        tuple(f"{run.run_id}: {text}" for text in [mark] if text is not None)
        for mark in (run.failed_tests, run.chosen_tests)
    )
    new = [key for key in pages if key not in known]
    # Files with GPU code, which are the large ones, were hashed for the plan.
    hashed = load_digests(run.traces_folder).values() if new else ()
    digests = {(one.path, one.state): one.sha256 for one in hashed}
    with ThreadPoolExecutor() as pool:
        identified = [*pool.map(partial(identify, digests=digests), new)]
    for key, found in zip(new, identified, strict=True):
        if isinstance(found, HostFile):
            known[key] = found
        else:
            incomplete.append(found)
    own = HostUsage(
        processors=(record.processor,),
        processes={run.run_id: len(processes)},
        libraries=tuple(
            describe(known[key], logged, constants.get(key))
            for key, logged in pages.items()
            if key in known
        ),
        incomplete=tuple(incomplete),
        failed=failed,
        chosen=chosen,
    )
    added = sorted(run.page_logs.glob(_ADDED.format("*")))
    usage = unite([own, *(load_record(path, HostUsage, *_WHAT) for path in added)])
    if new:
        files = tuple(known.values())
        write_record(
            run.page_log_files,
            HostFiles(processor=record.processor, files=files),
        )
    write_record(run.host_usage_file, usage)
    return usage


def add_touched(run: Run, usage: HostUsage, ended_ns: int) -> None:
    """Count what a proof touched as touched by a run, from now on.

    Args:
        usage: of the proof.
        ended_ns: when it ended. Two proofs may run at once.

    Raises:
        StoreError: the file can't be written.
    """
    # Whether it is complete, and how it ended, says nothing of the run.
    added = replace(usage, processes={}, incomplete=(), failed=(), chosen=())
    write_record(run.page_logs / _ADDED.format(ended_ns), added)


def load_files(run: Run) -> HostFiles:
    """The files that the processes of a run loaded, as far as their content is known.

    Raises:
        StoreError: they can't be read, or the run has no logs.
    """
    return load_record(run.page_log_files, HostFiles, *_WHAT)


def require_usage(run: Run, known_files: Iterable[HostFile] = ()) -> HostUsage:
    """Pages that the run's processes have touched so far, see ``gather``.

    Raises:
        StoreError: the run has no trace of CPU code.
    """
    usage = gather(run, known_files)
    if usage is None:
        raise StoreError(
            f"{run}: no trace of CPU code; make one with pytest --negativa --negativa-cpu, or with "
            "negativa trace --cpu -- COMMAND"
        )
    return usage


def combine(run: Run, parts: Sequence[Run], paths: PathRules) -> HostUsage | None:
    """Write what all of several runs touched to a new run; None if one was not traced.

    Args:
        paths: rules for the paths of libraries.
    """
    found = [usage for part in parts if (usage := gather(part)) is not None]
    if len(found) < len(parts):
        return None
    usage = unite(
        [
            replace(
                one,
                libraries=tuple(
                    replace(library, paths=tuple(sorted({*map(paths.apply, library.paths)})))
                    for library in one.libraries
                ),
            )
            for one in found
        ]
    )
    write_record(run.host_usage_file, usage)
    return usage


def with_pages(usage: Usage, run: Run) -> Usage:
    """The usage, with the pages of GPU code that were touched, and that were watched in vain.

    Args:
        run: that of the usage, which may have no logs of pages.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a log can't be read.
    """
    if (logs := run.gpu_page_logs) is None:
        return usage
    watched: dict[FileKey | None, list[set[Span]]] = defaultdict(list)
    touched: dict[FileKey | None, list[Span]] = defaultdict(list)
    processes: Counter[tuple[FileKey | None, int]] = Counter()
    for process in read_page_logs(logs):
        for one in process.gpu_code:
            touched[one.file] += (Span(page, page + PAGE_SIZE) for page in one.pages)
            watched[one.file].append({Span(*r) for r in one.ranges} if one.watched else set())
            processes[one.file, process.pid] += 1
    is_complete = not count_lost(logs)

    def add(used: LibraryUsage) -> LibraryUsage:
        state = used.library.state
        key = None if state is None else FileKey.of(used.library.path, state)
        expected = Counter(usage.processes[number].header.pid for number in used.processes)
        seen = is_complete and all(processes[key, pid] >= n for pid, n in expected.items())
        in_all = set.intersection(*watched[key]) if seen and watched[key] else ()
        pages = union(touched[key])
        return replace(used, touched=pages, untouched=tuple(minus(union(in_all), pages)))

    return replace(usage, libraries=tuple(map(add, usage.libraries)))


def with_pages_of(usage: Usage, parts: Iterable[Run]) -> Usage:
    """The usage of combined runs, with the pages that any of them touched, known by content.

    Raises:
        StoreError: the usage of a run can't be read.
    """
    touched: dict[str | None, list[Span]] = defaultdict(list)
    for part in parts:
        found = load_usage(part)
        for used in () if found is None else found.libraries:
            touched[used.library.sha256] += used.touched
    touched.pop(None, None)
    return replace(
        usage,
        libraries=tuple(
            replace(used, touched=union(touched.get(used.library.sha256, ())) or used.touched)
            for used in usage.libraries
        ),
    )
