"""Tables for the terminal: the one place that knows tabulate."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_negativa.reporting.text import printable

_ALIGNMENTS = {"l": "left", "r": "right"}


def format_table(
    align: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
) -> str:
    """A plain table; ``align`` has an ``l`` (text) or ``r`` (figures) for each column.

    ``total`` is a last row, set off by a rule. Cells may hold any text: see ``printable``.
    """
    # tabulate takes 10 ms to import, and most answers about a small library need no table.
    from tabulate import tabulate

    table = tabulate(
        [[printable(cell) for cell in row] for row in (rows if total is None else [*rows, total])],
        headers=headers,
        tablefmt="simple",
        colalign=[_ALIGNMENTS[a] for a in align],
        disable_numparse=True,
    )
    if total is None:
        return table
    lines = table.split("\n")
    return "\n".join([*lines[:-1], lines[1], lines[-1]])
