"""The figures of earlier runs, and of earlier revisions of a lock file."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pytest_negativa.analysis.snapshots import below_site
from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.report import CodeFilesRow, LibraryRow, RunReport
from pytest_negativa.models.snapshot import HistoryLibrary, HistoryPoint
from pytest_negativa.planning.snapshot import code_files_of, short_names
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
    return HistoryPoint(label, _libraries(lock.libraries, code_files_of(lock)))


def _of_report(report: RunReport) -> HistoryPoint:
    return HistoryPoint(report.run_id, _libraries(report.libraries, report.code_files))


def _libraries(
    libraries: Iterable[LibraryRow | LockedLibrary], files: Iterable[CodeFilesRow]
) -> tuple[HistoryLibrary, ...]:
    """The libraries, named as in a snapshot. Those at one path of two sites count as one."""
    rows: defaultdict[str, list[LibraryRow | LockedLibrary | CodeFilesRow]] = defaultdict(list)
    for one in libraries:
        rows[below_site(one.path)].append(one)
    for row in files:
        rows[row.name].append(row)
    return tuple(
        HistoryLibrary(
            name,
            ", ".join(sorted({one.version for one in same if one.version})) or None,
            sum(one.code_bytes for one in same),
            sum(one.unused_bytes for one in same),
        )
        for name, same in zip(short_names(rows), rows.values(), strict=True)
    )


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
