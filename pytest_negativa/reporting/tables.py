"""Tables for the terminal: the one place that knows tabulate."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_negativa.reporting.text import cut_middle, printable

_ALIGNMENTS = {"l": "left", "r": "right"}
_GAP = 2  # columns between two of a table
_HEADER_PADDING = 2  # tabulate.MIN_PADDING
# Columns go before a name gets shorter than this.
_SHORTEST_NAME = 28


def format_table(
    align: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    *,
    width: int = 0,
    drop: Sequence[int] = (),
) -> str:
    """A plain table; ``align`` has an ``l`` (text) or ``r`` (figures) for each column.

    ``total`` is a last row, set off by a rule. Cells may hold any text: see ``printable``.

    Args:
        align: see above.
        headers: of the columns.
        rows: the cells.
        total: see above.
        width: columns of the terminal; 0 for no limit.
        drop: which columns of the table go if it is wider, in this order. Then the names in the
            first column are cut in the middle.
    """
    # tabulate takes 10 ms to import, and most answers about a small library need no table.
    from tabulate import tabulate

    cells = [
        [printable(cell) for cell in row] for row in (rows if total is None else [*rows, total])
    ]
    left: Sequence[int] = range(len(headers))
    if width:
        left, names = _fit(headers, cells, width, drop)
        cells = [[cut_middle(row[0], names), *row[1:]] for row in cells]
    table = tabulate(
        [[row[column] for column in left] for row in cells],
        headers=[headers[column] for column in left],
        tablefmt="simple",
        colalign=[_ALIGNMENTS[align[column]] for column in left],
        disable_numparse=True,
    )
    if total is None:
        return table
    lines = table.split("\n")
    return "\n".join([*lines[:-1], lines[1], lines[-1]])


def _fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, drop: Sequence[int]
) -> tuple[Sequence[int], int]:
    """The columns that are shown, and the width of the first."""
    widths = [
        max(len(header) + _HEADER_PADDING, *(len(row[column]) for row in rows))
        for column, header in enumerate(headers)
    ]
    left = list(range(len(widths)))
    shortest = min(widths[0], _SHORTEST_NAME)
    for column in drop:
        if shortest + _rest(widths, left) <= width:
            break
        left.remove(column)
    return left, max(width - _rest(widths, left), len(headers[0]) + _HEADER_PADDING)


def _rest(widths: Sequence[int], left: Sequence[int]) -> int:
    return sum(widths[column] + _GAP for column in left if column)
