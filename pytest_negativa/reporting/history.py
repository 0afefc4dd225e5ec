"""Growth of GPU code from run to run, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_negativa.models.snapshot import Snapshot, SnapshotLibrary
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes, format_growth
from pytest_negativa.settings.globs import LibraryNames, matches_library


def render_history(points: Sequence[Snapshot], glob: str | None) -> Iterator[str]:
    """A table with a row for each point, or for each library of it.

    Args:
        points: the oldest first.
        glob: shows libraries whose names match; None for the totals.
    """
    rows: list[tuple[str, SnapshotLibrary]] = []
    for point in points:
        if glob is None and point.problem is None:
            rows.append((point.title, _total(point.libraries)))
        elif glob is not None:
            rows += [(point.title, one) for one in point.libraries if is_named(glob, one.name)]
    before: dict[str, int] = {}
    cells = []
    for label, one in rows:
        change = format_growth(before[one.name], one.code_bytes) if one.name in before else ""
        before[one.name] = one.code_bytes
        used = one.code_bytes - one.unused_bytes
        figures = (format_bytes(used), format_bytes(one.unused_bytes), change)
        cells.append([label, one.name, one.version or "", *figures])
    headers = ["when", "library", "version", "used", "unused", "change"]
    left = [n for n, _ in enumerate(headers) if n != 1 or glob is not None]
    if not any(row[2] for row in cells):
        left.remove(2)
    yield format_table(
        "".join("lllrrr"[n] for n in left),
        [headers[n] for n in left],
        [[row[n] for n in left] for row in cells],
        drop=[left.index(n) for n in (2, 5) if n in left],
        names=[left.index(1)] if 1 in left else (),
    )
    for point in points:
        if point.problem is not None:
            yield f"{point.title}: left out: {printable(point.problem)}"


def is_named(glob: str, name: str) -> bool:
    """Whether a glob matches a library of a history, which may be named with its folder."""
    return matches_library(glob, LibraryNames(name, None, None))


def _total(libraries: Sequence[SnapshotLibrary]) -> SnapshotLibrary:
    return SnapshotLibrary(name="total", rows=tuple(row for one in libraries for row in one.rows))
