"""The figures of earlier runs, and of earlier revisions of a lock file."""

from __future__ import annotations

import subprocess
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.analysis.snapshots import below_site
from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.snapshot import Snapshot
from pytest_negativa.planning.snapshot import snapshot_figures, snapshot_lock
from pytest_negativa.storage.lockfile import decode_lock
from pytest_negativa.storage.results import load_report
from pytest_negativa.storage.runs import Run, RunsFolder


def history_of_runs(runs: RunsFolder) -> tuple[Snapshot, ...]:
    """The runs that have a report, the oldest first.

    A run without a plan, with one for a part of the tests, or whose report can't be read has
    no libraries and says why.

    Raises:
        StoreError: there is none, or none has libraries.
    """
    folder = runs.find().folder.parent
    points = tuple(filter(None, map(_of_run, reversed(RunsFolder(folder).runs()))))
    if not points:
        raise StoreError(f"{folder}: no run with a report")
    if all(point.problem is not None for point in points):
        raise StoreError(f"{folder}: no run has figures: {points[-1].problem}")
    return points


def _of_run(run: Run) -> Snapshot | None:
    """None if it has no report."""
    try:
        if not run.report_file.exists():
            return None
        report = load_report(run)
        if not run.is_planned:
            why = run.failure or "no GPU code was loaded that is looked at"
            return Snapshot.left_out(run.run_id, f"nothing is planned from it: {why}")
        return _of_report(report)
    except StoreError as e:
        return Snapshot.left_out(run.run_id, str(e))
    except PermissionError as e:
        return Snapshot.left_out(run.run_id, f"{run}: cannot be read: {e.strerror}")


def history_of_lock(path: Path) -> tuple[Snapshot, ...]:
    """The revisions of a lock file in its git repository, the oldest first.

    A revision of another release's format has no libraries and says why.

    Raises:
        StoreError: git is not there, or has no revision of the file that can be read.
    """
    revisions = _git(path, "log", "--reverse", "--format=%h %cs", "--", path.name).decode()
    if not revisions:
        if not path.exists():
            raise StoreError(f"{path}: no such file, and git has no revision of it")
        raise StoreError(f"{path}: git has no revision of it; commit it first")
    points = tuple(_of_revision(path, *line.split()) for line in revisions.splitlines())
    if all(point.problem is not None for point in points):
        raise StoreError(f"{path}: none of its revisions can be read: {points[-1].problem}")
    return points


def _of_revision(path: Path, revision: str, date: str) -> Snapshot:
    label = f"{date} {revision}"
    try:
        lock = decode_lock(_git(path, "show", f"{revision}:./{path.name}"), f"{path}@{revision}")
    except StoreError as e:
        return Snapshot.left_out(label, str(e))
    return snapshot_lock(lock, label)


def _of_report(report: RunReport) -> Snapshot:
    if report.part is not None:
        return Snapshot.left_out(report.run_id, f"its plan is for {report.part} alone")
    rows = (replace(row, path=below_site(row.path)) for row in report.libraries)
    return snapshot_figures(report.run_id, rows)


def _git(path: Path, *words: str) -> bytes:
    with refusing("git", "started"):
        done = subprocess.run(
            ["git", "-C", str(path.absolute().parent), *words], capture_output=True, check=False
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise StoreError(
            f"{path}: git can't show its revisions: {said}; to compare it with another, name B, too"
        )
    return done.stdout
