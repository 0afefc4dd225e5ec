"""A run's report on the terminal: the largest facts first; one line if no GPU code was used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import LibraryRow, RunReport
from pytest_negativa.models.settings import ReportFormat, Reports
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.coverage import render_coverage
from pytest_negativa.reporting.rows import describe_trimmed, lists, sentences
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import cut_middle, itemize, printable, wrap
from pytest_negativa.reporting.units import format_items, format_names, format_share

_MAX_COMPILED = 5


def render_report(report: RunReport, options: Reports, width: int = 0) -> Iterator[str]:
    """The report, a paragraph at a time; ``width`` is that of the terminal, 0 for no limit."""
    yield "\n".join(wrap(printable(line), width) for line in sentences(report))
    if report.libraries:
        yield format_table(
            "lrrrrrrrr",
            (
                "library",
                "size",
                "GPU code",
                "unused",
                "share",
                "for other GPUs",
                "no used kernel",
                "elements kept",
                "kernels used",
            ),
            first_rows(report.libraries, options.top, attrgetter("name"), _cells),
            total=_cells("total", report.libraries),
            width=width,
            # A narrow terminal goes without elements, size, two reasons, kernels, in this order.
            drop=(7, 1, (5, 6), 8),
        )
    if report.trimmed is not None:
        yield wrap(describe_trimmed(report.trimmed), width)
    yield from render_coverage(report.coverage, options, width)
    # The report terminal-missing lists these.
    listed = {
        library.path
        for library in report.coverage
        if any(wanted.format is ReportFormat.TERMINAL_MISSING for wanted in options.formats)
    }
    for row in report.libraries:
        # Where nothing is used the table says all; a list helps where tests are missing.
        if row.used_kernels and row.unused_kernels and row.path not in listed:
            count = f"{len(row.unused_kernels)} of {row.kernels}"
            title = wrap(f"Unused kernels of {printable(row.name)}, {count}:", width)
            names = map(printable, map(demangle, row.unused_kernels))
            yield from itemize(title, (cut_middle(name, width - 2) for name in names))
    if report.runtime:
        yield "\n".join(wrap(line, width, "  ") for line in _runtime_lines(report))
    for title, lines in lists(report):
        yield from itemize(f"{title}:", lines, width)


def render_nothing(report: RunReport) -> str | None:
    """The one line for a run that used no GPU code, and what warnings there are; else None."""
    if report.not_covered:
        return None
    if not report.gpu_used:
        lines = ["negativa: no GPU code was used by any process of this run"]
    elif not report.libraries and not report.runtime:
        lines = ["negativa: no GPU code was loaded from any library that is looked at"]
    else:
        return None
    if report.replay is not None:
        lines.append(printable(report.replay))
    lines += itemize("Warnings:", report.warnings)
    return "\n".join(lines)


def _cells(name: str, rows: Sequence[LibraryRow]) -> list[str]:
    code = sum(r.code_bytes for r in rows)
    unused = sum(r.unused_bytes for r in rows)
    return [
        name,
        format_bytes(sum(r.size for r in rows)),
        format_bytes(code),
        format_bytes(unused),
        format_share(unused, code),
        format_bytes(sum(r.unused_bytes_by(UnusedReason.WRONG_ARCH.value) for r in rows)),
        format_bytes(sum(r.unused_bytes_by(UnusedReason.NO_USED_KERNEL.value) for r in rows)),
        _of(sum(r.kept_elements for r in rows), sum(r.elements for r in rows)),
        _of(sum(r.used_kernels for r in rows), sum(r.kernels for r in rows)),
    ]


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"


def _runtime_lines(report: RunReport) -> Iterator[str]:
    for is_new, title in ((True, "Compiled at run time"), (False, "From caches of compilers")):
        found = {demangle(n) for one in report.runtime if one.is_new is is_new for n in one.kernels}
        if found:
            shown = printable(format_names(sorted(found), _MAX_COMPILED))
            yield f"{title}: {format_items(len(found), 'kernel', 'kernels')} ({shown})."
    yield "negativa report json lists them."
