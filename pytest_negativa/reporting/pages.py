"""``negativa pages`` and ``negativa misses`` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.listing import CodeKind, MissedCode, MissedLibrary
from pytest_negativa.models.pages import HostReport, HostRow
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.reporting.difference import template_of
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_items, format_names, format_share


def render_host_report(report: HostReport, *, top: int) -> Iterator[str]:
    """The report, a paragraph at a time.

    Args:
        top: rows of the table; 0 for all.
    """
    watched = sum(row.watched for row in report.libraries)
    touched = sum(row.touched for row in report.libraries)
    libraries = format_items(len(report.libraries), "library", "libraries")
    processes = format_items(report.processes, "process", "processes")
    yield (
        f"{format_bytes(touched)} of {format_bytes(watched)} CPU code "
        f"({format_share(touched, watched)}) in {libraries} was touched by {processes} on "
        f"{printable(', '.join(report.processors))}. Programs themselves and libc are not traced."
    )
    if report.libraries:
        yield format_table(
            "lrrrrrr",
            ("library", "size", "CPU code", "touched", "", "functions", "touched at most"),
            first_rows(report.libraries, top, lambda row: Path(row.path).name, _cells),
            total=_cells("total", report.libraries),
            drop=((5, 6), 1, 2),
        )
    unwatched = [
        f"{row.path}: {row.unwatched}" for row in report.libraries if row.unwatched is not None
    ]
    for title, lines in (
        ("All CPU code counts as used, because more may have been touched:", report.incomplete),
        ("Tests that failed may need CPU code that they did not reach:", report.failed),
        ("Tests that were not chosen may need more CPU code:", report.chosen),
        ("CPU code that was not traced:", unwatched),
    ):
        yield from itemize(title, lines)


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


def render_misses(libraries: Sequence[MissedLibrary], *, top: int) -> Iterator[str]:
    """How much came back, a paragraph at a time.

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
    yield format_table(
        "lrrr",
        ("library", "misses", "pages", "size"),
        first_rows(libraries, top, attrgetter("name"), _missed_cells),
        total=_missed_cells("total", libraries),
        drop=(2, 1),
    )


def render_missed_code(libraries: Sequence[MissedLibrary], *, top: int) -> Iterator[str]:
    """The names of what came back, a paragraph at a time; see ``render_misses``."""
    for row in libraries[: top or None]:
        if row.code:
            # Signatures of C++ are long, and a file has no width that cuts them.
            yield format_table(
                "rrl",
                ("misses", "pages", f"touched in {row.name}"),
                first_rows(row.code, top, describe_code, _code_cells),
                drop=(1,),
                names=(2,),
            )
    yield from itemize(
        "What these pages hold is not known:",
        [row.unknown for row in libraries if row.unknown is not None],
    )


def _missed_cells(name: str, rows: Sequence[MissedLibrary]) -> list[str]:
    pages = sum(row.pages for row in rows)
    return [
        name,
        f"{sum(row.misses for row in rows):,}",
        f"{pages:,}",
        format_bytes(pages * PAGE_SIZE),
    ]


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
        # A template stands for its instantiations: the signature of one is wider than a terminal.
        templates = dict.fromkeys(map(template_of, code.kernels))
        kernels = format_items(len(code.kernels), "kernel", "kernels")
        listed = f": {format_names(templates, 1)}, {kernels}" if templates else ""
        return f"{code.arch} code{place}{listed}"
    if code.kind is CodeKind.GPU_HEADERS:
        return f"headers of the region{place}"
    return f"{code.kind.value}{': ' + code.name if code.name else ''}"
