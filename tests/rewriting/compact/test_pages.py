"""Which pages stay and where they go, on the tables of a library and spans of our choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.gpucode.elf import ElfTables, read_tables
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import size
from pytest_negativa.rewriting.compact.pages import lay_out
from tests.support.compacting import build, needs_compiler, read

pytestmark = needs_compiler

PAGE = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[ElfTables, int, int]:
    """Tables of a library, and where the whole pages of its ``.nv_fatbin`` start and end."""
    path = build(tmp_path_factory.mktemp("library"))
    return (*tables_of(path),)


def tables_of(path: Path) -> tuple[ElfTables, int, int]:
    with ByteSource(path) as source:
        tables = read_tables(source)
    span = next(s.span for s in read(path).sections if s.name == ".nv_fatbin")
    return tables, -(-span.start // PAGE) * PAGE, span.end // PAGE * PAGE


def test_holes_are_whole_pages_inside_the_zeros(library: tuple[ElfTables, int, int]) -> None:
    tables, start, _ = library
    layout = lay_out(tables, [(start + 1, start + 3 * PAGE - 1)], PAGE, 1000)
    assert layout.holes == ((start + PAGE, start + 2 * PAGE),)
    assert lay_out(tables, [(start + 1, start + 2 * PAGE - 1)], PAGE, 1000).holes == ()
    # What is next to each other in the file may belong to two spans.
    pair = [(start, start + PAGE), (start + 2 * PAGE, start + 3 * PAGE)]
    assert lay_out(tables, pair, PAGE, 1000).holes == tuple(pair)


def test_pages_move_up_in_order(library: tuple[ElfTables, int, int]) -> None:
    tables, start, _ = library
    pages = lay_out(tables, [(start, start + 2 * PAGE)], PAGE, 1000)
    assert pages.offset_of(start - 1) == start - 1
    assert not list(pages.pieces(start, start + 2 * PAGE))
    assert pages.offset_of(start + 2 * PAGE) == start
    assert pages.nearest_offset(start + 5) == start
    assert pages.nearest_offset(1 << 40) == size(pages.kept)
    assert list(pages.pieces(start - 8, start + 2 * PAGE + 8)) == [
        (start - 8, start),
        (start + 2 * PAGE, start + 2 * PAGE + 8),
    ]


def test_the_largest_holes_stay(library: tuple[ElfTables, int, int]) -> None:
    tables, start, end = library
    zeros = []
    position = start
    for pages in (1, 4, 2, 5, 3):
        zeros.append((position, position + pages * PAGE))
        position += (pages + 1) * PAGE
    assert position <= end
    least = len(tables.segments)
    for number in range(6):
        layout = lay_out(tables, zeros, PAGE, least + number)
        sizes = sorted((e - s) // PAGE for s, e in layout.holes)
        assert sizes == [1, 2, 3, 4, 5][5 - number :]
        assert layout.given_up == sum(range(1, 6 - number)) * PAGE
