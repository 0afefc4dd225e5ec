"""Runs to one run (shards, machines, GPUs, samples).

The result depends on the traces alone, not on the order of the runs or on what was combined before:
copies of traces mean the same on every machine, and ``tracing.merge`` sorts them. A copy knows
libraries by their SHA-256, which lies beside the original in ``digests.json``, and not by inodes
and times. Its paths are those of this machine, and its name is a digest of its bytes. So the same
trace has the same copy whatever it came through, and two shards share their libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import OptionError, StoreError, refusing
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.trace import (
    UNENDED,
    Header,
    LibraryRecord,
    Role,
    TracedLibrary,
)
from pytest_negativa.models.verdict import Need, Verdict
from pytest_negativa.planning.code_files import unite
from pytest_negativa.planning.parts import VerifiedPart, unite_verdicts
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import (
    load_digests,
    load_healed,
    load_opened,
    load_usage,
    load_verdict,
    save_opened,
)
from pytest_negativa.storage.runs import (
    TRACE_SUFFIX,
    Run,
    RunsFolder,
    fetch_to_combine,
    holds_samples,
    run_at,
)
from pytest_negativa.storage.system import open_regular
from pytest_negativa.storage.urls import Url, is_url
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.trace_files import TraceReader, decode_record, require_ended

_FETCHED_AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class RunPart:
    """A run that is to be combined with others.

    Attributes:
        name: as the user gave it.
        run: its folder.
        traces: its traces; none for a run of CPU code alone.
        digests: of its libraries.
        problem: why it can't be taken; None if it can.
        failure: why it must not feed a plan; None if it may.
    """

    name: str
    run: Run
    traces: tuple[Path, ...] = ()
    digests: dict[TracedLibrary, TracedLibrary] | None = None
    problem: str | None = None
    failure: str | None = None


def fetch_parts(names: Iterable[str], target: Path) -> dict[str, Run | StoreError]:
    """Fetch the runs that lie at URLs, several at a time; by URL, with what failed.

    Raises:
        OptionError: a URL can't be used.
    """

    def fetch(number_and_name: tuple[int, str]) -> Run | StoreError:
        number, name = number_and_name
        try:
            return fetch_to_combine(Url(name), target / str(number))
        except StoreError as e:
            return e

    urls = list(filter(is_url, names))
    with ThreadPoolExecutor(_FETCHED_AT_A_TIME) as pool:
        return dict(zip(urls, pool.map(fetch, enumerate(urls)), strict=True))


def read_part(name: str, folder: RunsFolder, fetched: Run | StoreError | None = None) -> RunPart:
    """Look at a run that is to be combined with others.

    Args:
        name: see ``RunsFolder.find``.
        folder: of all runs.
        fetched: of a URL, see ``fetch_parts``.
    """
    try:
        if isinstance(fetched, StoreError):
            raise fetched
        run = fetched or run_at(folder.find(name).folder)
    except (OptionError, StoreError) as e:
        return RunPart(name, Run(Path(name)), problem=e.beside(name))
    failure = run.failure or run.incomplete_reason
    if run.has_pages and not run.trace_files():
        return RunPart(name, run, failure=failure)
    try:
        traces = run.require_traces()
        with_header = tuple(t for t in traces if TraceReader(t).header is not None)
        if run.has_samples:
            traces = with_header
        else:
            require_ended(traces)
        digests = load_digests(run.traces_folder)
        failure = failure or merge_traces(traces).why_incomplete(UNENDED)
    except (StoreError, OSError) as e:
        problem = e.beside(run) if isinstance(e, StoreError) else str(e)
        return RunPart(name, run, problem=problem)
    return RunPart(name, run, traces, digests, failure=failure)


def refuse_bad(parts: Sequence[RunPart]) -> None:
    """Name all bad parts. A failed run is none: the result fails, and its report shows its use.

    Raises:
        OptionError: there is a bad one, and one is not there.
        StoreError: there is a bad one.
    """
    lines = sorted(f"{part.name}: {part.problem}" for part in parts if part.problem is not None)
    if lines:
        is_there = (is_url(part.name) or part.run.folder.is_dir() for part in parts)
        raise (StoreError if all(is_there) else OptionError)("\n".join(lines))


def copy_traces(parts: Sequence[RunPart], target: Run, paths: PathRules) -> None:
    """Copy the traces of all parts into a new run. If this ends early, the run has none.

    Raises:
        StoreError: a trace can't be read, or a copy can't be written.
    """
    target.make()
    copies = target.folder / "copied"
    with refusing(copies, "written"):
        copies.mkdir()
        for part in parts:
            for trace in part.traces:
                copy_portable(trace, copies, part.digests or {}, paths)
        copies.replace(target.trace_dir)


def combine_opened(run: Run, parts: Sequence[Run]) -> None:
    """Note in a run what any of its parts opened. If one did not watch, all files stay.

    Raises:
        StoreError: a part's note can't be read, or the run's can't be written.
    """
    found = [load_opened(part) for part in parts]
    if found and all(found):
        save_opened(run, unite(found))


def healed_at(paths: PathRules, parts: Iterable[RunPart]) -> tuple[Need, ...]:
    """Spans that healing gave back in the runs, whose traces lack them; by the paths here.

    Raises:
        StoreError: a run's list can't be read.
    """
    return tuple(
        replace(need, library=paths.apply(need.library or ""))
        for part in parts
        for need in load_healed(part.run)
    )


def prove_by_parts(
    run: Run, planned: Sequence[AnalyzedLibrary], parts: Iterable[Run]
) -> Verdict | None:
    """Write the verdict that the parts have reached together; None if none of them was verified.

    Samples prove nothing, and need no proof: the plan keeps what they used.

    Raises:
        StoreError: a part's verdict can't be read, or the verdict can't be written.
    """
    tested: list[VerifiedPart] = []
    for part in parts:
        if not part.has_samples:
            usage = load_usage(part) or merge_traces(part.trace_files())
            verdict = load_verdict(part)
            # One on CPU code alone says nothing here.
            one = VerifiedPart(usage, verdict if verdict and verdict.gpu_libraries else None)
            tested += () if one in tested else (one,)
    if not any(part.verdict for part in tested):
        return None
    tested.sort(key=lambda part: part.name)
    verdict = unite_verdicts(run.run_id, planned, tested)
    write_record(run.verdict_file, verdict, indent=1)
    return verdict


_MARK = b'"record":"library"'
_encode = msgspec.json.Encoder().encode


def copy_portable(
    trace: Path, folder: Path, digests: Mapping[TracedLibrary, TracedLibrary], paths: PathRules
) -> str:
    """Copy a trace and return the name of its copy, which may have been there before.

    Lines that can't be read are copied as they are, so that a reader of the copy finds them.

    Args:
        trace: the file of a process that has ended.
        folder: for the copy.
        digests: of its libraries, see ``load_digests``.
        paths: rules for the paths of libraries and of the project's root.

    Raises:
        StoreError: the trace can't be read, or the copy can't be written.
    """
    digest = hashlib.sha256()
    part = folder / f".{os.getpid()}.part"
    of_samples = holds_samples(trace.parent)
    try:
        with open_regular(trace, follow=False) as source, part.open("wb") as target:
            for number, line in enumerate(source):
                # Few lines name a path; decoding all of them would take most of the time. The
                # header is decoded however it is written: a sample must not pass as a session.
                portable = line
                if number == 0 or _MARK in line:
                    portable = _portable(line, digests, paths, of_samples=of_samples)
                digest.update(portable)
                target.write(portable)
        name = f"{digest.hexdigest()[:32]}{TRACE_SUFFIX}"
        part.replace(folder / name)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink()
        raise StoreError(f"{trace}: cannot be copied to {folder}: {e.strerror}") from e
    return name


def _portable(
    line: bytes,
    digests: Mapping[TracedLibrary, TracedLibrary],
    paths: PathRules,
    *,
    of_samples: bool,
) -> bytes:
    try:
        record = decode_record(line)
    except UNDECODABLE:
        return line
    if isinstance(record, Header):
        role = Role.SAMPLE if of_samples else record.role
        changed = replace(record, root=paths.apply(record.root), role=role)
        return line if changed == record else _encode(changed) + b"\n"
    if not isinstance(record, LibraryRecord):
        return line
    library = digests.get(record.library, record.library)
    library = replace(library, path=paths.apply(library.path))
    if library.sha256 is not None:
        library = replace(library, device=None, inode=None, mtime_ns=None, ctime_ns=None)
    return _encode(replace(record, library=library)) + b"\n"
