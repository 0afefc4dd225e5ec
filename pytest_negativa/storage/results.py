"""Results in a run's folder: usage, digests, maps, plans, spans, healing, baseline, verdict.

``digests.json`` has the SHA-256 of each library when the run ended, from the maps of a planned
run, else from ``tracing.merge``. With these digests a run can be planned again, or combined with
others, after its libraries were installed anew or on another machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.analysis import Analysis, AnalyzedLibrary
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.trace import TracedLibrary, Usage
from pytest_negativa.models.verdict import (
    Need,
    Verdict,
)
from pytest_negativa.storage.outcomes import read_outcomes, unite_tests
from pytest_negativa.storage.records import (
    decode_versioned,
    load_if_there,
    load_map,
    load_record,
    load_rows,
    write_record,
    write_rows,
)
from pytest_negativa.storage.runs import Run, RunsFolder, digests_in
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import read_input

_MAX_BASELINE = 64 << 20
"""Bytes at a URL. A baseline of PyTorch with NVIDIA's libraries has 100 kB."""

_PLAN_AGAIN = "plan again (negativa locate)"
_REMOVE = "remove it, or trace again"


def write_run(
    run: Run, analysis: Analysis, *, with_plans: bool, latest: bool = True
) -> tuple[str, ...]:
    """Write what was found, and return the names of what was written, for the report.

    Args:
        run: the run.
        analysis: what to write.
        with_plans: False for a run that must not feed a plan: neither plans nor spans then.
        latest: whether it becomes the last run.

    Raises:
        StoreError: a file can't be written.
    """
    names = _file_names(analysis.libraries)
    write_record(run.usage_file, analysis.usage)
    save_digests(run.traces_folder, (used.library for used in analysis.usage.libraries))
    # The content of Negativa-ML's trace.json, and what tells the two apart.
    negativa_ml_trace = {
        "format": 1,
        "loaded_sos": [library.library.path for library in analysis.usage.libraries],
        "detected_kernels": sorted(
            {name for image in analysis.usage.iter_images() for name in image.kernels}
        ),
        "devices": [device.compute_capability for device in analysis.usage.devices],
        "run_ids": list(analysis.usage.run_ids),
    }
    write_record(run.negativa_ml_file, negativa_ml_trace)
    for library in analysis.libraries:
        name = names[library.plan.library.path]
        write_record(run.map_dir / name, library.library_map)
        if with_plans:
            _save_plan(run, name, library.plan)
    _remove_others(run.map_dir, names.values())
    for folder in (run.plan_dir, run.spans_dir):
        _remove_others(folder, names.values() if with_plans else ())
    # A folder that holds nothing but traces, such as a recording, is no run's.
    if latest and run.trace_dir.is_dir():
        run.make_latest()
    folders = (run.map_dir, *((run.plan_dir, run.spans_dir) if with_plans else ()))
    return (
        f"{run.trace_dir.name}/",
        run.negativa_ml_file.name,
        run.usage_file.name,
        *(f"{folder.name}/" for folder in folders if analysis.libraries),
    )


def negativa_ml_spans(plan: LibraryPlan) -> dict[str, Any]:
    """Content of Negativa-ML's ``spans/<library>.json`` (``so_path``, ``spans``), and what is new.

    Spans with different reasons stay apart.
    """
    library = plan.library
    return {
        "format": 1,
        "so_path": library.path,
        "size": library.size,
        "mtime_ns": library.mtime_ns,
        "build_id": library.build_id,
        "spans": [
            {"start": decision.start, "end": decision.end, "reason": decision.reason}
            for decision in plan.decisions
            if not decision.kept and decision.size
        ],
        "sha256": library.sha256,
        "used_kernels": plan.used_kernels,
    }


def _file_names(libraries: Sequence[AnalyzedLibrary]) -> dict[str, str]:
    """A file name for each library: its own, with a digest of its path if two share a name."""
    names: dict[str, str] = {}
    for library in libraries:
        path = library.plan.library.path
        name = f"{Path(path).name}.json"
        if name in names.values():
            mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
            name = f"{Path(path).name}.{mark}.json"
        names[path] = name
    return names


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove files of an earlier analysis of the run; later stages would take them up."""
    with refusing(folder, "cleared"):
        for path in folder.glob("*.json"):
            if path.name not in names:
                path.unlink()


def load_plans(run: Run) -> tuple[LibraryPlan, ...]:
    """The plans of a run, by library.

    Raises:
        StoreError: there are none, or one can't be read.
    """
    return tuple(_load_plan(path) for path in _plan_files(run))


def load_planned(run: Run) -> tuple[AnalyzedLibrary, ...]:
    """The maps and plans of a run, by library.

    Raises:
        StoreError: there are none, one can't be read, or a plan's map is not there.
    """
    found = []
    for path in _plan_files(run):
        plan = _load_plan(path)
        library_map = load_map(run.map_dir / path.name)
        if library_map.library != plan.library:
            raise StoreError(
                f"{path}: of {plan.library.path}, and the map of that name is of another state or "
                "file; plan again (negativa locate)"
            )
        found.append(AnalyzedLibrary(library_map, plan))
    return tuple(found)


def save_plans(run: Run, plans: Iterable[LibraryPlan]) -> None:
    """Write plans of a run anew, and the spans that follow from them.

    Raises:
        StoreError: a file can't be read or written.
    """
    changed = {plan.library.path: plan for plan in plans}
    for path in _plan_files(run):
        plan = changed.get((before := _load_plan(path)).library.path)
        if plan is not None and plan != before:
            _save_plan(run, path.name, plan)


def _save_plan(run: Run, name: str, plan: LibraryPlan) -> None:
    write_record(run.plan_dir / name, plan)
    # Spans are of one file.
    if not plan.is_files:
        write_record(run.spans_dir / name, negativa_ml_spans(plan), indent=1)


def _plan_files(run: Run) -> tuple[Path, ...]:
    paths = run.plan_files()
    if run.incomplete_reason is not None or not paths:
        raise StoreError(run.why_unplanned())
    return paths


def load_healed(run: Run) -> tuple[Need, ...]:
    """All that healing gave back in a run's plans.

    Raises:
        StoreError: the file can't be read.
    """
    return load_rows(run.healed_file, Need, "a list of healed spans", _REMOVE)


def save_healed(run: Run, needs: Iterable[Need]) -> None:
    """Note what healing gave back, so that planning the run again keeps it.

    Args:
        needs: all that was given back, by earlier healing, too.

    Raises:
        StoreError: the file can't be written.
    """
    write_rows(run.healed_file, dict.fromkeys(needs), indent=1)


def save_opened(run: Run, opened: Sequence[WatchedFiles]) -> None:
    """Write which files of distributions that are GPU code were opened; nothing if there are none.

    Raises:
        StoreError: it can't be written.
    """
    if opened:
        write_rows(run.opened_file, opened)


def load_opened(run: Run) -> tuple[WatchedFiles, ...]:
    """Files of distributions that are GPU code and were opened; empty if nothing tells.

    Raises:
        StoreError: the file can't be read.
    """
    return load_rows(run.opened_file, WatchedFiles, "a list of opened files", "trace again")


def load_usage(run: Run) -> Usage | None:
    """Code that a run used and loaded; None if it isn't located yet, or no run.

    Raises:
        StoreError: the file can't be read.
    """
    return load_if_there(run.usage_file, Usage, "the usage of a traced run", _PLAN_AGAIN)


def load_report(run: Run) -> RunReport:
    """The rows of a run's report.

    Raises:
        StoreError: the run isn't located yet, or the file can't be read.
    """
    if not run.report_file.exists():
        raise StoreError(f"{run}: no report here; make it with {run.locate_command}")
    remedy = f"make it again with {run.locate_command}"
    return load_record(run.report_file, RunReport, "a report", remedy)


def load_history(run: Run) -> tuple[RunReport, ...]:
    """The reports of the runs beside a run, its own included, the oldest first.

    Runs without a plan, or with a report that can't be read, are left out.
    """
    found = []
    for one in reversed(RunsFolder(run.folder.parent).runs()):
        with contextlib.suppress(StoreError, PermissionError):
            report = load_report(one)
            if one.plan_files():
                found.append(report)
    return tuple(found)


def load_tests(run: Run) -> tuple[TestResult, ...]:
    """Results of the tests of a run, or of the runs that it unites; none if no pytest session ran.

    Raises:
        StoreError: the file can't be read.
    """
    if run.outcomes_file.exists():
        return read_outcomes(run.outcomes_file).tests
    return load_rows(run.combined_tests_file, TestResult, "tests", "combine again")


def combine_tests(run: Run, parts: Iterable[Run]) -> None:
    """Write how the tests of several runs ended to a new run.

    Raises:
        StoreError: a file can't be read or written.
    """
    if tests := unite_tests(map(load_tests, parts)):
        write_rows(run.combined_tests_file, tests)


def load_verdict(run: Run) -> Verdict | None:
    """The last verdict on a run; None if there is none.

    Raises:
        StoreError: the file can't be read.
    """
    return load_if_there(run.verdict_file, Verdict, "a verdict", "verify again")


def _load_plan(path: Path) -> LibraryPlan:
    return load_record(path, LibraryPlan, "a plan", _PLAN_AGAIN)


def load_baseline(path: Path | Url) -> RunReport:
    """Read a baseline, or the report of a run as JSON.

    Raises:
        StoreError: it can't be read, or is none of this release.
    """
    return decode_versioned(
        read_input(path, _MAX_BASELINE),
        RunReport,
        origin=str(path),
        what="a baseline",
        remedy="write it again (negativa report baseline:FILE)",
    )


def load_digests(folder: Path) -> dict[TracedLibrary, TracedLibrary]:
    """By library as a trace has it: the library with its digest; empty if there is no file.

    Args:
        folder: of the traces.

    Raises:
        StoreError: the file can't be read.
    """
    libraries = load_rows(
        digests_in(folder),
        TracedLibrary,
        "digests of libraries",
        "remove it, and trace again if libraries have changed since",
    )
    return {replace(library, sha256=None): library for library in libraries}


def save_digests(folder: Path, libraries: Iterable[TracedLibrary]) -> None:
    """Write the libraries whose digest is known.

    Raises:
        StoreError: the file can't be written.
    """
    known = (library for library in libraries if library.sha256 is not None)
    write_rows(digests_in(folder), known)
