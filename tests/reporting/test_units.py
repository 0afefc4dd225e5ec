"""Figures as people read them."""

from __future__ import annotations

import pytest

from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import (
    format_bytes,
    format_count,
    format_share,
    format_time,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (46_341_200, "46.3 MB"),
        (999_499, "999.5 kB"),
        (999_500, "1.0 MB"),
        (1_994_000_000, "2.0 GB"),
        (3_460_000_000_000, "3.5 TB"),
        (12_345_000_000_000_000, "12,345.0 TB"),
        (-2_000, "-2.0 kB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1, 3, "33.3%"), (0, 5, "0.0%"), (5, 5, "100.0%"), (0, 0, "-")]
)
def test_share(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (None, "-"),
        (0, "0.0 us"),
        (1_240, "1.2 us"),
        (999_949, "999.9 us"),
        (999_950, "1.0 ms"),
        (1_500_000_000, "1.5 s"),
        (7_200_000_000_000, "7,200.0 s"),
    ],
)
def test_time(nanoseconds: int | None, text: str) -> None:
    assert format_time(nanoseconds) == text


def test_count() -> None:
    assert format_count(1_257) == "1,257"
    assert format_count(0) == "0"
    assert format_count(None) == "-"


def test_table_aligns_and_sets_off_the_total() -> None:
    table = format_table("lr", ["name", "n"], [["a", "1"], ["b", "1,000"]], total=["all", "1,001"])
    assert table.split("\n") == [
        "name        n",
        "------  -----",
        "a           1",
        "b       1,000",
        "------  -----",
        "all     1,001",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_Z6kernelPf", "_Z6kernelPf"),
        ("übung größer.so", "übung größer.so"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\x9b2J", "\\x9b2J"),
        ("lib\u202eos.", "lib\\u202eos."),
        ("lib\udcff.so", "lib\\udcff.so"),
    ],
)
def test_names_that_a_terminal_would_act_on(name: str, text: str) -> None:
    assert printable(name) == text
    assert format_table("l", ["name"], [[name]]).split("\n")[2:] == [text]


def test_share_of_almost_all_or_nothing_says_so() -> None:
    assert format_share(99_999, 100_000) == ">99.9%"
    assert format_share(100_000, 100_000) == "100.0%"
    assert format_share(99_940, 100_000) == "99.9%"
    assert format_share(1, 100_000) == "<0.1%"
    assert format_share(50, 100_000) == "0.1%"
