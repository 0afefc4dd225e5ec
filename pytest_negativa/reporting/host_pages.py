"""CPU code that a run touched, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.hostcode import HostReport, HostRow
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_bytes, format_items, format_share

_HEADERS = ("library", "size", "CPU code", "touched", "", "functions", "touched at most")
_ALIGN = "lrrrrrr"


def render_host_report(report: HostReport, *, top: int) -> Iterator[str]:
    """The report, a paragraph at a time.

    Args:
        top: rows of the table; 0 for all.
    """
    watched, touched = report.watched, report.touched
    libraries = format_items(len(report.libraries), "library", "libraries")
    processes = format_items(report.processes, "process", "processes")
    yield (
        f"{format_bytes(touched)} of {format_bytes(watched)} CPU code "
        f"({format_share(touched, watched)}) in {libraries} was touched by {processes} on "
        f"{printable(', '.join(report.processors))}. Programs themselves and libc are not traced."
    )
    if report.libraries:
        yield _table(report.libraries, top)
    if report.incomplete:
        title = "All CPU code counts as used, because more may have been touched:"
        yield itemize(title, report.incomplete)
    if report.failed:
        yield itemize("Tests that failed may need CPU code that they did not reach:", report.failed)
    unwatched = [
        f"{row.path}: {row.unwatched}" for row in report.libraries if row.unwatched is not None
    ]
    if unwatched:
        yield itemize("CPU code that was not traced:", unwatched)


def _table(rows: Sequence[HostRow], top: int) -> str:
    shown = first_rows(rows, top, lambda row: Path(row.path).name, _cells)
    return format_table(_ALIGN, _HEADERS, shown, total=_cells("total", rows), drop=((5, 6), 1, 2))


def _cells(name: str, rows: Sequence[HostRow]) -> list[str]:
    watched = sum(row.watched for row in rows)
    touched = sum(row.touched for row in rows)
    return [
        name,
        format_bytes(sum(row.size for row in rows)),
        format_bytes(watched),
        format_bytes(touched),
        format_share(touched, watched),
        f"{sum(row.functions or 0 for row in rows):,}",
        f"{sum(row.touched_functions or 0 for row in rows):,}",
    ]
