"""The figures of earlier runs, and of earlier revisions of a lock file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.snapshot import HistoryLibrary, HistoryPoint
from pytest_negativa.planning.snapshot import code_files_of
from pytest_negativa.storage.lockfile import decode_lock
from pytest_negativa.storage.results import load_history
from pytest_negativa.storage.runs import RunsFolder


def history_of_runs(runs: RunsFolder) -> tuple[HistoryPoint, ...]:
    """The runs that have a report, the oldest first.

    Raises:
        StoreError: there is none.
    """
    found = tuple(map(_of_report, load_history(runs.find())))
    if not found:
        raise StoreError(f"{runs.folder}: no run with a report of this release")
    return found


def history_of_lock(path: Path) -> tuple[HistoryPoint, ...]:
    """The revisions of a lock file in its git repository, the oldest first.

    A revision of another release's format has no libraries and says why.

    Raises:
        StoreError: git is not there, or has no revision of the file that can be read.
    """
    revisions = _git(path, "log", "--reverse", "--format=%h %cs", "--", path.name).decode()
    if not revisions:
        raise StoreError(f"{path}: git has no revision of it; commit it first")
    points = tuple(_of_revision(path, *line.split()) for line in revisions.splitlines())
    if all(point.problem is not None for point in points):
        raise StoreError(f"{path}: none of its revisions can be read: {points[-1].problem}")
    return points


def _of_revision(path: Path, revision: str, date: str) -> HistoryPoint:
    label = f"{date} {revision}"
    try:
        lock = decode_lock(_git(path, "show", f"{revision}:./{path.name}"), f"{path}@{revision}")
    except StoreError as e:
        return HistoryPoint(label, (), str(e))
    return HistoryPoint(label, tuple(_of_lock(lock)))


def _of_lock(lock: Lock) -> Iterator[HistoryLibrary]:
    for one in lock.libraries:
        yield HistoryLibrary(one.name, one.version, one.code_bytes, one.unused_bytes)
    for row in code_files_of(lock):
        yield HistoryLibrary(row.name, row.version, row.code_bytes, row.unused_bytes)


def _of_report(report: RunReport) -> HistoryPoint:
    libraries = (
        HistoryLibrary(row.name, row.version, row.code_bytes, row.unused_bytes)
        for row in report.rows
    )
    return HistoryPoint(report.run_id, tuple(libraries))


def _git(path: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(path.absolute().parent), *words], capture_output=True, check=False
        )
    except OSError as e:
        raise StoreError(f"{path}: git cannot be started: {e.strerror}") from e
    if done.returncode:
        raise StoreError(f"{path}: git says: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
