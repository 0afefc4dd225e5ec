"""Code that came back to slimmed libraries, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.listing import CodeKind, MissedCode, MissedLibrary
from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import itemize
from pytest_negativa.reporting.units import format_bytes, format_items

_HEADERS = ("library", "misses", "pages", "size")


def render_misses(libraries: Sequence[MissedLibrary], *, top: int) -> Iterator[str]:
    """The report, a paragraph at a time.

    Args:
        libraries: those to which something came back, the most misses first.
        top: rows of each table; 0 for all.
    """
    if not libraries:
        yield (
            "Nothing came back: no process that wrote a log touched code that was removed. "
            "negativa misses --help shows how to have logs."
        )
        return
    pages = sum(row.pages for row in libraries)
    misses = sum(row.misses for row in libraries)
    yield (
        f"{format_items(pages, 'page', 'pages')} ({format_bytes(pages * PAGE_SIZE)}) came back to "
        f"{format_items(len(libraries), 'library', 'libraries')}, "
        f"{format_items(misses, 'time', 'times')} in all processes."
    )
    rows = first_rows(libraries, top, attrgetter("name"), _cells)
    yield format_table("lrrr", _HEADERS, rows, total=_cells("total", libraries), drop=(2, 1))
    for row in libraries[: top or None]:
        if row.code:
            yield _code_table(row, top)
    unknown = [row.unknown for row in libraries if row.unknown is not None]
    if unknown:
        yield itemize("What these pages hold is not known:", unknown)


def _cells(name: str, rows: Sequence[MissedLibrary]) -> list[str]:
    pages = sum(row.pages for row in rows)
    return [
        name,
        f"{sum(row.misses for row in rows):,}",
        f"{pages:,}",
        format_bytes(pages * PAGE_SIZE),
    ]


def _code_table(library: MissedLibrary, top: int) -> str:
    rows = first_rows(library.code, top, describe_code, _code_cells)
    # Signatures of C++ are long, and a file has no width that cuts them.
    headers = ("misses", "pages", f"touched in {library.name}")
    return format_table("rrl", headers, rows, drop=(1,), names=(2,))


def _code_cells(name: str, rows: Sequence[MissedCode]) -> list[str]:
    return [
        f"{sum(row.misses for row in rows):,}",
        f"{sum(row.pages for row in rows):,}",
        name,
    ]


def describe_code(code: MissedCode) -> str:
    """A function, or GPU code, for people."""
    place = "" if code.offset is None else f" at {code.offset:#x}"
    if code.kind is CodeKind.FUNCTION:
        return demangle(code.name) if code.name else f"function{place}"
    if code.kind is CodeKind.GPU_CODE:
        names = ", ".join(map(demangle, code.kernels[:1]))
        more = f" and {len(code.kernels) - 1:,} more" if len(code.kernels) > 1 else ""
        return f"{code.arch} code{place}" + (f": {names}{more}" if names else "")
    if code.kind is CodeKind.GPU_HEADERS:
        return f"headers of the region{place}"
    return f"{code.kind.value}{': ' + code.name if code.name else ''}"
