"""Reports of ``negativa slim``: tables, problems, advice, and the cost of holes at a fork."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.slimming import PROBLEMS, SlimRow, SlimStatus
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_items, format_share

_IN_TABLE = {
    SlimStatus.SLIMMED, SlimStatus.WOULD_SLIM, SlimStatus.ALREADY, SlimStatus.UNDONE,
    SlimStatus.WOULD_UNDO,
}  # fmt: skip
# As errors name the file that can't be written, which has another name for each library.
_ITS_PATH = re.compile(r"/[^:]*: ")
# From so many alike on, they share a line: small libraries that have nothing to remove.
_MANY = 4
# Milliseconds for two mappings (2 virtual cores, Linux 6.18).
_FORK_OF_HOLE = 0.0026


def render_rows(rows: Sequence[SlimRow], nothing: str, *, top: int = 0) -> str:
    """Render tables of the libraries that changed and that are sound, and lines for the others.

    Args:
        rows: of all libraries.
        nothing: the text if there are no rows.
        top: rows of each table; 0 for all.
    """
    parts: list[str] = []
    if changed := sorted(
        (row for row in rows if row.status in _IN_TABLE),
        key=lambda row: (not row.useless, -row.before, row.path),
    ):
        parts.append(_table(("library", "before", "after", "share", ""), changed, top))
    if sound := sorted(
        (row for row in rows if row.status is SlimStatus.SOUND),
        key=lambda row: (-row.after, row.path),
    ):
        parts.append(_table(("library", None, "size", None, ""), sound, top))
    if lines := list(_lines(rows)):
        parts.append("\n".join(lines))
    return "\n\n".join(parts) if rows else nothing


def render_holes(count: int, shortest: int) -> str | None:
    """Cost of the holes of cut libraries; None if a fork takes less than a millisecond more.

    Args:
        count: of all libraries together.
        shortest: bytes; shorter ones stayed in the files.
    """
    if (slower := count * _FORK_OF_HOLE) < 1:
        return None
    return (
        f"the libraries have {count:,} holes: a fork of a process that loads them all takes about "
        f"{slower:.1f} ms more. Shorter ones than {format_bytes(shortest)} stay in the files "
        "(--spare-holes)"
    )


def render_problems(rows: Sequence[SlimRow]) -> Iterator[str]:
    """Yield a line for each library that is an error of the command; many alike share one."""
    yield from _united(
        (row.path, _ITS_PATH.sub("", _status(row)), _status(row))
        for row in rows
        if row.status in PROBLEMS
    )


def _table(headers: Sequence[str | None], rows: Sequence[SlimRow], top: int) -> str:
    def cells(name: str, some: Sequence[SlimRow]) -> list[str]:
        before, after = sum(row.before for row in some), sum(row.after for row in some)
        statuses = {row.status.value for row in some}
        return [
            name,
            format_bytes(before),
            # Of files that were removed, nothing is there to check.
            format_bytes(after) if after or "before" in headers else "-",
            format_share(after, before) if after < before else "-",
            statuses.pop() if len(statuses) == 1 else "",
        ]

    def name(row: SlimRow) -> str:
        others = f" and {format_items(row.others, 'more name', 'more names')}" if row.others else ""
        return row.path + others

    total = [*cells(format_items(len(rows), "library", "libraries"), rows)[:-1], ""]
    return format_table("lrrrl", headers, first_rows(rows, top, name, cells), total, drop=(3,))


def _lines(rows: Sequence[SlimRow]) -> Iterator[str]:
    """Details of the libraries in tables, and lines for those in none."""
    told = {SlimStatus.MISSING, SlimStatus.INTERRUPTED}
    found: list[tuple[str, str, str]] = []
    for row in rows:
        if row.detail and row.status in {*_IN_TABLE, SlimStatus.SOUND}:
            detail = f"{row.status.value}, {row.detail}"
            found.append((row.path, detail, detail))
        found += [(row.path, note, note) for note in row.notes]
        if row.status in told:
            found.append((row.path, f"{row.path}: {_status(row)}", _status(row)))
        if row.status is SlimStatus.SPARE_AWAY:
            found.append((row.path, f"{row.status.value}: {_BRING}", _status(row)))
        if row.status in {SlimStatus.LEFT, SlimStatus.DIFFERENT}:
            found.append((row.path, _kind(row), _status(row)))
    yield from _united(found)


def _united(lines: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Lines of libraries; many of a kind share one.

    Args:
        lines: the path of a library, the kind of the text, and the text.
    """
    alike: defaultdict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for path, kind, text in lines:
        # Two folders may have the same library.
        alike[kind][path, text] = None
    for kind, same in alike.items():
        (first, text), *others = same
        if len(same) < _MANY:
            yield from (printable(f"{path}: {text}") for path, text in same)
        else:
            more = format_items(len(others), "more library", "more libraries")
            common = text if all(other == text for _, other in others) else kind
            yield printable(f"{first} and {more}: {common}")


def _status(row: SlimRow) -> str:
    return f"{row.status.value}: {row.detail or ''}"


def _kind(row: SlimRow) -> str:
    """The status without figures."""
    is_small = (row.detail or "").startswith(_SMALL)
    return (
        f"{row.status.value}: each would save less than the minimum" if is_small else _status(row)
    )


_BRING = "bring the spares back, or set NEGATIVA_SPARE_DIR to their folder"
_SMALL = ("saves only", "there is nothing to remove")
