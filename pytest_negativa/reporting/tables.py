"""Tables for the terminal (tabulate): columns that fit, cut names, first rows and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pytest_negativa.reporting.text import cut_middle, printable, terminal_width

_T = TypeVar("_T")

_ALIGNMENTS = {"l": "left", "r": "right"}
_NOTHING = frozenset(("", "-"))  # cells that tell nothing
_GAP = 2  # columns between two of a table
_HEADER_PADDING = 2  # tabulate.MIN_PADDING
# Columns go before a name gets shorter than this.
_SHORTEST_NAME = 28


def first_rows(
    items: Sequence[_T],
    top: int,
    name_of: Callable[[_T], str],
    cells_of: Callable[[str, Sequence[_T]], list[str]],
) -> list[list[str]]:
    """Rows of the first items, and one for all others together.

    Args:
        items: in their order.
        top: how many have rows of their own; 0 for all.
        name_of: the first cell of an item's row.
        cells_of: a row of this name, with figures added up over items.
    """
    shown, rest = items[: top or None], items[top or len(items) :]
    rows = [cells_of(name_of(one), [one]) for one in shown]
    return [*rows, cells_of(f"{len(rest):,} more", rest)] if rest else rows


def format_table(
    align: str,
    headers: Sequence[str | None],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    *,
    width: int | None = None,
    drop: Sequence[int | tuple[int, ...]] = (),
    names: Sequence[int] = (0,),
    drop_empty: bool = False,
) -> str:
    """A plain table; ``align`` has an ``l`` (text) or ``r`` (figures) for each column.

    ``total`` is a last row, set off by a rule. Cells may hold any text: see ``printable``.

    Args:
        align: see above.
        headers: of the columns; one without a header is left out.
        rows: the cells.
        total: see above.
        width: columns of the terminal; 0 for no limit, None to ask the terminal.
        drop: which columns of the table go if it is wider, in this order; those in a tuple go
            together, because one says little without the other.
        names: the columns whose cells are cut in the middle if it is wider then.
        drop_empty: whether columns go that have no value in any row; the first one stays.
    """
    # tabulate takes 10 ms to import, and most answers about a small library need no table.
    from tabulate import tabulate

    cells = [
        [printable(cell) for cell in row] for row in (rows if total is None else [*rows, total])
    ]
    left: Sequence[int] = [
        column
        for column in range(len(headers))
        if headers[column] is not None
        and (not (drop_empty and column) or any(row[column] not in _NOTHING for row in cells))
    ]
    titles = [header or "" for header in headers]
    width = terminal_width() if width is None else width
    cut: dict[int, int] = {}
    if width:
        left, cut = _fit(
            titles,
            cells,
            width,
            [(one,) if isinstance(one, int) else one for one in drop],
            [column for column in names if column in left],
            left,
        )
    cells = [
        [cut_middle(cell, cut.get(column, 0)) for column, cell in enumerate(row)] for row in cells
    ]
    table = tabulate(
        [[row[column] for column in left] for row in cells],
        headers=[titles[column] for column in left],
        tablefmt="simple",
        colalign=[_ALIGNMENTS[align[column]] for column in left],
        disable_numparse=True,
    )
    if total is None:
        return table
    lines = table.split("\n")
    return "\n".join([*lines[:-1], lines[1], lines[-1]])


def _fit(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    drop: Sequence[tuple[int, ...]],
    names: Sequence[int],
    left: Sequence[int],
) -> tuple[Sequence[int], dict[int, int]]:
    """Columns of ``left`` that fit, and the widths of those with names."""
    least = [len(header) + _HEADER_PADDING for header in headers]
    widths = [max([wide, *(len(row[column]) for row in rows)]) for column, wide in enumerate(least)]
    shortest = [min(one, _SHORTEST_NAME) if n in names else one for n, one in enumerate(widths)]
    left = list(left)
    for columns in drop:
        if _width(shortest, left) <= width:
            break
        left = [column for column in left if column not in columns]
    room = width - _width([0 if n in names else one for n, one in enumerate(widths)], left)
    cut = {}
    # What a short name leaves is for the longer ones.
    for number, column in enumerate(sorted(names, key=lambda n: widths[n])):
        cut[column] = min(widths[column], max(room // (len(names) - number), least[column]))
        room -= cut[column]
    return left, cut


def _width(widths: Sequence[int], left: Sequence[int]) -> int:
    return sum(widths[column] for column in left) + _GAP * (len(left) - 1)
