"""Reports of slimming for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.slimming import PROBLEMS, UNMET, SlimRow, SlimStatus
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable, terminal_width
from pytest_negativa.reporting.units import format_bytes, format_items, format_share

_IN_TABLE = {
    SlimStatus.SLIMMED, SlimStatus.WOULD_SLIM, SlimStatus.ALREADY, SlimStatus.UNDONE,
    SlimStatus.WOULD_UNDO,
}  # fmt: skip
# As errors name the file that can't be written, which has another name for each library.
_ITS_PATH = re.compile(r"/[^:]*: ")
# From so many alike on, they share a line: small libraries that have nothing to remove.
_MANY = 4


def render_rows(rows: Sequence[SlimRow], nothing: str) -> str:
    """Render tables of the libraries that changed and that are sound, and lines for the others.

    Args:
        rows: of all libraries.
        nothing: the text if there are no rows.
    """
    parts: list[str] = []
    changed = sorted(
        (row for row in rows if row.status in _IN_TABLE),
        key=lambda row: (not row.useless, -row.before, row.path),
    )
    if changed:
        before, after = sum(r.before for r in changed), sum(r.after for r in changed)
        total = (
            format_items(len(changed), "library", "libraries"),
            format_bytes(before),
            format_bytes(after),
            _share(after, before),
            "",
        )
        headers = ("library", "before", "after", "share", "")
        cells = [_cells(row) for row in changed]
        parts += _with_details("lrrrl", headers, cells, changed, total)
    if sound := sorted((r for r in rows if r.status is SlimStatus.SOUND), key=lambda r: r.path):
        # Of files that were removed, nothing is there.
        sizes = [(r.path, format_bytes(r.after) if r.after else "-", r.status.value) for r in sound]
        parts += _with_details("lrl", ("library", "size", ""), sizes, sound, None)
    lines = list(_lines(rows))
    if lines:
        parts.append("\n".join(lines))
    return "\n\n".join(parts) if rows else nothing


def render_problems(rows: Sequence[SlimRow]) -> Iterator[str]:
    """Yield a line for each library that is an error of the command; many alike share one."""
    alike: dict[tuple[SlimStatus, str], list[SlimRow]] = {}
    for row in rows:
        if row.status in PROBLEMS:
            alike.setdefault((row.status, _ITS_PATH.sub("", row.detail or "")), []).append(row)
    for (_status, common), alike_rows in alike.items():
        first, *others = alike_rows
        if len(alike_rows) < _MANY:
            yield from dict.fromkeys(map(_line, alike_rows))
        else:
            more = format_items(len(others), "more library", "more libraries")
            detail = first.detail if len({row.detail for row in alike_rows}) == 1 else common
            yield _line(replace(first, path=f"{first.path} and {more}", detail=detail))


def _cells(row: SlimRow) -> tuple[str, ...]:
    others = f" and {format_items(row.others, 'more name', 'more names')}" if row.others else ""
    return (
        row.path + others,
        format_bytes(row.before),
        format_bytes(row.after),
        _share(row.after, row.before),
        row.status.value,
    )


def _with_details(
    align: str,
    headers: Sequence[str],
    cells: Sequence[tuple[str, ...]],
    rows: Sequence[SlimRow],
    total: tuple[str, ...] | None,
) -> Iterator[str]:
    """A table whose last column tells the details, too; lines below it where that is too wide."""
    drop = [headers.index("share")] if "share" in headers else []
    details = [
        f"{one[-1]}, {row.detail}" if row.detail else one[-1]
        for one, row in zip(cells, rows, strict=True)
    ]
    told = [(*one[:-1], detail) for one, detail in zip(cells, details, strict=True)]
    whole = format_table(align, headers, told, total, width=0)
    width = terminal_width()
    if not width or all(len(line) <= width for line in whole.split("\n")):
        yield whole
        return
    yield format_table(align, headers, cells, total, width=width, drop=drop)
    lines = [(row.detail, f"{row.path}: {row.detail}") for row in rows if row.detail]
    if lines:
        yield "\n".join(_united(lines, "libraries"))


def _share(after: int, before: int) -> str:
    return format_share(after, before) if after < before else "-"


def _lines(rows: Sequence[SlimRow]) -> Iterator[str]:
    notes = [(note, f"{row.path}: {note}") for row in rows for note in row.notes]
    yield from _united(notes, "libraries")
    told = {*UNMET, SlimStatus.INTERRUPTED} - {SlimStatus.SPARE_AWAY}
    yield from (_line(row) for row in rows if row.status in told)
    away = [(_BRING, _line(row)) for row in rows if row.status is SlimStatus.SPARE_AWAY]
    yield from _united(away, "libraries have no spare here")
    left = [(_kind(row), _line(row)) for row in rows if row.status is SlimStatus.LEFT]
    yield from _united(left, "libraries left as they are")


def _united(lines: Sequence[tuple[str, str]], title: str) -> Iterator[str]:
    """The lines, each with its kind; many of a kind become one line."""
    counts = Counter(kind for kind, _ in lines)
    # Two folders may have the same library.
    yield from dict.fromkeys(printable(line) for kind, line in lines if counts[kind] < _MANY)
    for kind, count in counts.items():
        if count >= _MANY:
            yield f"{count:,} {title}: {printable(kind)}"


def _line(row: SlimRow) -> str:
    return printable(f"{row.path}: {row.status.value}: {row.detail or ''}")


def _kind(row: SlimRow) -> str:
    """The reason without its figures."""
    detail = row.detail or ""
    return "each would save less than the minimum" if detail.startswith(_SMALL) else detail


_BRING = "bring the spares back, or set NEGATIVA_SPARE_DIR to their folder"
_SMALL = ("saves only", "there is nothing to remove")
