"""Traces of CPU code in a run's folder: gathered and read. ``start`` begins them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.hostcode.page_logs import count_lost, read_page_logs
from pytest_negativa.hostcode.usage import (
    describe,
    identify,
    unite,
    unite_logs,
    with_paths,
)
from pytest_negativa.models.base import Record
from pytest_negativa.models.hostcode import (
    HOST_FILES_VERSION,
    HOST_USAGE_VERSION,
    HostFile,
    HostFiles,
    HostUsage,
)
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.records import load_record, write_record
from pytest_negativa.storage.results import load_digests
from pytest_negativa.storage.runs import Run

_T = TypeVar("_T", bound=Record)


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
        if not run.host_usage_file.exists():
            return None
        return _load(run.host_usage_file, HostUsage, HOST_USAGE_VERSION)
    record = load_files(run)
    known = {f.file: f for f in (*known_files, *record.files)}
    processes = read_page_logs(run.page_logs)
    pages = unite_logs(processes)
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
    usage = unite(
        [
            HostUsage(
                format_version=HOST_USAGE_VERSION,
                processors=(record.processor,),
                processes={run.run_id: len(processes)},
                libraries=tuple(describe(known[key], pages[key]) for key in pages if key in known),
                incomplete=tuple(incomplete),
                failed=failed,
                chosen=chosen,
            )
        ]
    )
    if new:
        files = tuple(known.values())
        write_record(
            run.page_log_files,
            HostFiles(format_version=HOST_FILES_VERSION, processor=record.processor, files=files),
        )
    write_record(run.host_usage_file, usage)
    return usage


def load_files(run: Run) -> HostFiles:
    """The files that the processes of a run loaded, as far as their content is known.

    Raises:
        StoreError: they can't be read, or the run has no logs.
    """
    return _load(run.page_log_files, HostFiles, HOST_FILES_VERSION)


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


def load_usage(path: Path) -> HostUsage:
    """Pages that a run touched, from its folder or from its file ``cpu.json``.

    Raises:
        StoreError: there is none, or it can't be read.
    """
    if path.is_dir():
        return require_usage(Run(path.resolve()))
    return _load(path, HostUsage, HOST_USAGE_VERSION)


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
            replace(one, libraries=tuple(with_paths(library, paths) for library in one.libraries))
            for one in found
        ]
    )
    write_record(run.host_usage_file, usage)
    return usage


def _load(path: Path, kind: type[_T], version: int) -> _T:
    return load_record(path, kind, version, "a trace of CPU code", "trace again")
