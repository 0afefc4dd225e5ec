"""Figures as people read them."""

from __future__ import annotations

import pytest

from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_count, format_share, format_time


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(1_000), "1.0 kB"),
        (format_bytes(999_499), "999.5 kB"),
        (format_bytes(999_500), "1.0 MB"),
        (format_bytes(3_460_000_000_000), "3.5 TB"),
        (format_bytes(12_345_000_000_000_000), "12,345.0 TB"),
        (format_bytes(-2_000), "-2.0 kB"),
        (format_share(1, 3), "33.3%"),
        (format_share(0, 5), "0.0%"),
        (format_share(0, 0), "-"),
        (format_share(99_999, 100_000), ">99.9%"),
        (format_share(100_000, 100_000), "100.0%"),
        (format_share(99_940, 100_000), "99.9%"),
        (format_share(1, 100_000), "<0.1%"),
        (format_share(50, 100_000), "0.1%"),
        (format_time(None), "-"),
        (format_time(0), "0.0 us"),
        (format_time(999_949), "999.9 us"),
        (format_time(999_950), "1.0 ms"),
        (format_time(7_200_000_000_000), "7,200.0 s"),
        (format_count(1_257), "1,257"),
        (format_count(None), "-"),
    ],
)
def test_figures(shown: str, text: str) -> None:
    assert shown == text


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
