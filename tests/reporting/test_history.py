"""The table of a history."""

from __future__ import annotations

import pytest

from pytest_negativa.models.snapshot import HistoryLibrary, HistoryPoint
from pytest_negativa.reporting.history import render_history

POINTS = (
    HistoryPoint(
        "a", (HistoryLibrary("x.so", "1.0", 100, 50), HistoryLibrary("y.so", None, 20, 0))
    ),
    HistoryPoint("b", (), "an old format\x1b"),
    HistoryPoint("c", (HistoryLibrary("x.so", "2.0", 180, 160),)),
)


def rows(glob: str | None) -> list[list[str]]:
    [table, *_] = render_history(POINTS, glob)
    return [line.split() for line in table.splitlines() if "--" not in line]


def test_totals() -> None:
    assert rows(None) == [
        ["when", "used", "unused", "change"],
        ["a", "70", "B", "50", "B", "█" * 12 + "░" * 8],
        ["c", "20", "B", "160", "B", "+60", "B,", "+50.0%", "█" * 3 + "░" * 27],
    ]
    [_, problem] = render_history(POINTS, None)
    assert problem == "b: left out: an old format\\x1b"


def test_libraries() -> None:
    assert rows("x*") == [
        ["when", "library", "version", "used", "unused", "change"],
        ["a", "x.so", "1.0", "50", "B", "50", "B", "█" * 9 + "░" * 8],
        ["c", "x.so", "2.0", "20", "B", "160", "B", "+80", "B,", "+80.0%", "█" * 3 + "░" * 27],
    ]
    assert [row[1] for row in rows("*")[1:]] == ["x.so", "y.so", "x.so"]
    assert rows("none")[1:] == []


def test_bars_are_as_long_as_the_terminal_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(columns: str) -> int:
        monkeypatch.setenv("COLUMNS", columns)
        [table, _] = render_history(POINTS, None)
        assert max(map(len, table.splitlines())) <= int(columns)
        return max(line.count("█") + line.count("░") for line in table.splitlines())

    assert [longest(columns) for columns in ("200", "60", "44")] == [30, 19, 0]
