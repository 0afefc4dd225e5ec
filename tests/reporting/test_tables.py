"""Tables and sentences in terminals of any width."""

from __future__ import annotations

import re

import pytest

from pytest_negativa.models.settings import Reports
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.reporting.slimming import render_rows
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.terminal import render_report
from pytest_negativa.reporting.text import fit
from tests.support.reports import report, row

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


def test_a_table_without_rows_has_its_headers() -> None:
    """As that of tests, in a terminal, if none of them ran a kernel."""
    found = format_table("llrr", HEADERS, [], width=70)
    assert found.split("\n")[0].split() == list(HEADERS)


@pytest.mark.parametrize("width", range(24, 130))
def test_a_figure_is_never_shown_without_what_it_is_of(width: int) -> None:
    """Both reasons together are the unused code."""
    options = Reports(formats=(), top=20)
    [found] = [t for t in render_report(report(row()), options, width) if t.startswith("library")]
    header = re.split(r"\s{2,}", found.split("\n")[0])
    assert ("for other GPUs" in header) == ("no used kernel" in header), header
    assert {"elements", "kept", "kernels", "used"}.isdisjoint(header)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, table(None, drop=(1, 2)))) <= 40
    # A pipe has none.
    monkeypatch.delenv("COLUMNS")
    assert table(None) == table(0)


SENTENCE = "A device of compute capability 9.0 loads at most 13.8 MB of this; the rest is dead."


def test_sentences_are_wrapped_and_tables_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    table = format_table("llrr", HEADERS, ROWS, width=0)
    shown = fit(f"{SENTENCE}\n\n{table}\n\nNotes:\n  {SENTENCE}")
    sentence, found, notes = shown.split("\n\n")
    assert found == table
    assert max(map(len, f"{sentence}\n{notes}".split("\n"))) <= 50
    assert sentence.replace("\n", " ") == SENTENCE
    # The next line of a list looks like none of its items.
    assert [len(line) - len(line.lstrip()) for line in notes.split("\n")] == [0, 2, 6]
    monkeypatch.delenv("COLUMNS")
    assert fit(SENTENCE) == SENTENCE


@pytest.mark.parametrize(
    "command",
    [
        "negativa slim undo site-packages/of/the/program",
        "negativa slim --lock negativa.lock --spare spares",
        "negativa combine RUN RUN",
        "negativa debloat -- COMMAND",
        "negativa runs --json",
        "pytest --negativa-verify --negativa-heal",
    ],
)
@pytest.mark.parametrize("words", range(12))
def test_a_command_in_a_sentence_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, words: int, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = f"{'word ' * words}{command} if the rest of this sentence needs another line"
    shown = fit(text)
    assert command in shown
    assert max(map(len, shown.split("\n"))) <= 60
    assert shown.split() == text.split()


def test_a_long_path_keeps_its_place_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = f"/venv/{'long-' * 10}name.so"
    assert fit(f"Not covered:\n  {path}: not found") == f"Not covered:\n  {path}:\n      not found"


def test_reasons_are_below_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its spare was fetched; programs find it with NEGATIVA_SPARE_DIR=/spares"
    rows = [SlimRow.unchanged(f"lib{n}.so", SlimStatus.SOUND, 1 << 20, reason) for n in range(5)]
    monkeypatch.setenv("COLUMNS", "80")
    table, below = render_rows(rows, "").split("\n\n")
    assert max(map(len, table.split("\n"))) <= 80
    assert below == f"lib0.so and 4 more libraries: sound, {reason}"


def test_long_paths_of_slimmed_libraries_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "lib/python3.13/site-packages/nvidia/cu13/lib/libcudnn_engines_precompiled.so.9"
    row = SlimRow(path=path, status=SlimStatus.SLIMMED, before=1 << 30, after=1 << 20)
    assert path in render_rows([row], "")
    monkeypatch.setenv("COLUMNS", "80")
    shown = render_rows([row], "")
    assert max(map(len, shown.split("\n"))) <= 80
    assert "lib/python3.13" in shown
    assert "precompiled.so.9" in shown
