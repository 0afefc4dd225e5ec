"""Tables in terminals of any width."""

from __future__ import annotations

import pytest

from pytest_negativa.reporting.tables import format_table

HEADERS = ("library", "version", "before", "after")
ROWS = [
    ("libtorch_cuda_linalg_of_a_long_name.so", "2.9.1", "1.2 GB", "1.3 GB"),
    ("libc10.so", "2.9.1", "1.0 kB", "1.0 kB"),
]


def table(width: int | None, drop: tuple[int, ...] = ()) -> list[str]:
    text = format_table("llrr", HEADERS, ROWS, width=width, drop=drop)
    return [line.rstrip() for line in text.split("\n")]


def test_a_wide_terminal_changes_nothing() -> None:
    assert table(70, drop=(1,)) == table(0)


def test_columns_go_before_names_get_short() -> None:
    found = table(54, drop=(1, 2))
    assert found[0].split() == ["library", "before", "after"]
    assert found[2].split()[0] == "libtorch_cuda_li...f_a_long_name.so"
    assert max(map(len, found)) <= 54


@pytest.mark.parametrize("width", [40, 44, 60, 61])
def test_two_columns_of_names_share_the_room(width: int) -> None:
    rows = [("tests/test_vectors.py::test_add[1]", "tests/test_vectors.py::test_b", "1.00")]
    found = format_table("llr", ("test", "", "similarity"), rows, width=width, names=(0, 1))
    assert max(map(len, found.split("\n"))) <= width
    assert found.split("\n")[-1].split()[-1] == "1.00"


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, table(None, drop=(1, 2)))) <= 40
    # A pipe has none.
    monkeypatch.delenv("COLUMNS")
    assert table(None) == table(0)
