"""Reports of slimming for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from pytest_negativa.models.slimming import PROBLEMS, UNMET, SlimRow, SlimStatus
from pytest_negativa.reporting.tables import first_rows, format_table
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
# Milliseconds for two mappings (2 virtual cores, Linux 6.18).
_FORK_OF_GAP = 0.0026


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
        headers = ("library", "before", "after", "share", "")
        parts += _with_details("lrrrl", headers, changed, top)
    if sound := sorted(
        (row for row in rows if row.status is SlimStatus.SOUND),
        key=lambda row: (-row.after, row.path),
    ):
        parts += _with_details("lrl", ("library", "size", ""), sound, top)
    lines = list(_lines(rows))
    if lines:
        parts.append("\n".join(lines))
    return "\n\n".join(parts) if rows else nothing


def render_gaps(count: int, shortest: int) -> str | None:
    """What the gaps of cut libraries cost; None if a fork takes less than a millisecond more.

    Args:
        count: of all libraries together.
        shortest: bytes; shorter ones stayed in the files.
    """
    if (slower := count * _FORK_OF_GAP) < 1:
        return None
    return (
        f"the libraries have {count:,} gaps: a fork of a process that loads them all takes about "
        f"{slower:.1f} ms more. Shorter ones than {format_bytes(shortest)} stay in the files "
        "(--spare-gaps)"
    )


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


def _with_details(
    align: str, headers: Sequence[str], rows: Sequence[SlimRow], top: int
) -> Iterator[str]:
    """A table whose last column tells the details, too; lines below it where that is too wide."""

    def cells(name: str, some: Sequence[SlimRow], *, details: bool = False) -> list[str]:
        before, after = sum(row.before for row in some), sum(row.after for row in some)
        texts = {
            f"{row.status.value}, {row.detail}" if details and row.detail else row.status.value
            for row in some
        }
        # Of files that were removed, nothing is there.
        sizes = [format_bytes(after) if after else "-"]
        if "share" in headers:
            sizes = [format_bytes(before), format_bytes(after), _share(after, before)]
        return [name, *sizes, texts.pop() if len(texts) == 1 else ""]

    def name(row: SlimRow) -> str:
        others = f" and {format_items(row.others, 'more name', 'more names')}" if row.others else ""
        return row.path + others

    total = [*cells(format_items(len(rows), "library", "libraries"), rows)[:-1], ""]
    told = first_rows(rows, top, name, partial(cells, details=True))
    whole = format_table(align, headers, told, total, width=0)
    width = terminal_width()
    if not width or all(len(line) <= width for line in whole.split("\n")):
        yield whole
        return
    drop = [headers.index("share")] if "share" in headers else []
    short = first_rows(rows, top, name, cells)
    yield format_table(align, headers, short, total, width=width, drop=drop)
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
