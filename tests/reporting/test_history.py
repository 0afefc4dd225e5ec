"""The table of a history."""

from __future__ import annotations

from pytest_negativa.models.snapshot import Snapshot, SnapshotLibrary, SnapshotRow
from pytest_negativa.reporting.history import render_history


def library(name: str, version: str | None, code: int, unused: int) -> SnapshotLibrary:
    rows = (
        SnapshotRow(None, None, False, 1, code - unused),
        SnapshotRow(None, None, True, 1, unused),
    )
    return SnapshotLibrary(name=name, version=version, rows=rows)


def point(title: str, *libraries: SnapshotLibrary) -> Snapshot:
    return Snapshot(format_version=1, title=title, libraries=libraries)


POINTS = (
    point("a", library("x.so", "1.0", 100, 50), library("y.so", None, 20, 0)),
    Snapshot.left_out("b", "an old format\x1b"),
    point("c", library("x.so", "2.0", 180, 160)),
)


def rows(glob: str | None) -> list[list[str]]:
    [table, *_] = render_history(POINTS, glob)
    return [line.split() for line in table.splitlines() if "--" not in line]


def test_totals() -> None:
    assert rows(None) == [
        ["when", "used", "unused", "change"],
        ["a", "70", "B", "50", "B"],
        ["c", "20", "B", "160", "B", "+60", "B,", "+50.0%"],
    ]
    [_, problem] = render_history(POINTS, None)
    assert problem == "b: left out: an old format\\x1b"


def test_libraries() -> None:
    assert rows("x*") == [
        ["when", "library", "version", "used", "unused", "change"],
        ["a", "x.so", "1.0", "50", "B", "50", "B"],
        ["c", "x.so", "2.0", "20", "B", "160", "B", "+80", "B,", "+80.0%"],
    ]
    assert [row[1] for row in rows("*")[1:]] == ["x.so", "y.so", "x.so"]
    assert rows("none")[1:] == []
