"""An image report as text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pytest_negativa.models.image import (
    ImageLibrary,
    ImageReport,
    Package,
    SuiteUse,
)
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import (
    format_bytes,
    format_foreign,
    format_items,
    format_share,
)

_UNOWNED = "(no package)"


def render_image_report(report: ImageReport, top: int) -> Iterator[str]:
    """The report, a paragraph at a time; ``top`` rows of each table, 0 for all."""
    libraries = report.libraries
    without = (
        f"{format_items(report.without_code, 'other ELF file', 'other ELF files')} of "
        f"{format_bytes(report.without_code_bytes)}{format_foreign(report.foreign)}"
    )
    if not libraries:
        found = (
            "nothing could be read"
            if report.unreadable and not report.without_code
            else "no NVIDIA GPU code"
        )
        yield f"{printable(report.root)}: {found}; {without}"
    else:
        size, code = sum(r.size for r in libraries), sum(r.code_bytes for r in libraries)
        files = sum(row.files or 1 for row in libraries)
        yield (
            f"{printable(report.root)}: {format_bytes(code)} GPU code in "
            f"{format_items(files, 'file', 'files')} of {format_bytes(size)}; {without}"
        )
        yield _library_table(report, top)
        yield _package_table(report, top)
        yield from _summary(report)
        yield from _further_columns(report)
    if report.hidden:
        yield (
            f"Upper layers hide {format_items(report.hidden, 'ELF file', 'ELF files')} of "
            f"{format_bytes(report.hidden_bytes)}, which the image still carries. They are not "
            "counted above. Remove files in the layer that adds them."
        )
    if report.slimmed:
        slimmed = format_items(len(report.slimmed), "file was", "files were")
        title = (
            f"{slimmed} slimmed by negativa slim; only the GPU code that is left counts, and none "
            "of it is slimmable:"
        )
        yield itemize(title, report.slimmed, most=top)
    if report.notes:
        yield itemize("Notes:", report.notes)


def _further_columns(report: ImageReport) -> Iterator[str]:
    """Tell the options that add the columns that this report lacks."""
    if report.run_id is None and not report.devices:
        yield (
            "--run RUN (a traced run) or --lock FILE adds the columns by the suite and slimmable; "
            "--arch sm_90 adds slimmable alone."
        )
    elif report.run_id is None:
        yield "--run RUN (a traced run) or --lock FILE adds the column by the suite."


def _library_table(report: ImageReport, top: int) -> str:
    shown = report.libraries[: top or None]
    rest = report.libraries[len(shown) :]
    # In an environment all paths begin alike.
    folders = [os.path.dirname(row.path) for row in shown]  # noqa: PTH120
    common = os.path.commonpath(folders) if folders else ""
    rows = [
        [
            os.path.relpath(row.path, common) if common else row.path,
            row.suite.value if row.suite is not None else "-",
            *_figures([row]),
            row.slimmable_by.value if row.slimmable_by is not None else "-",
        ]
        for row in shown
    ]
    if rest:
        rows.append([f"{len(rest):,} more", "", *_figures(rest), ""])
    headers = ["file", "by the suite", "size", "GPU code", "slimmable", "", "by"]
    total = ["total", "", *_figures(report.libraries), ""]
    table = format_table(
        "llrrrrl", headers, rows, total=total, drop=(2, 5, 6, 1, 3), drop_empty=True
    )
    # A long path as a header would make the table wider than the terminal.
    return f"Files below {printable(common)}:\n{table}" if common else table


def _figures(rows: Sequence[ImageLibrary]) -> list[str]:
    code = sum(row.code_bytes for row in rows)
    known = [row.slimmable_bytes for row in rows if row.slimmable_bytes is not None]
    return [
        format_bytes(sum(row.size for row in rows)),
        format_bytes(code),
        format_bytes(sum(known)) if known else "-",
        format_share(sum(known), code) if known else "-",
    ]


def _package_table(report: ImageReport, top: int) -> str:
    shown = report.packages[: top or None]
    rows = [
        [
            _name(row.package),
            row.package.manager.value if row.package is not None else "",
            f"{row.libraries + row.code_files:,}",
            format_bytes(row.size),
            format_bytes(row.code_bytes),
            "-" if row.slimmable_bytes is None else format_bytes(row.slimmable_bytes),
            "-" if report.run_id is None else f"{row.never_loaded:,}",
            "-" if report.run_id is None else format_bytes(row.never_loaded_bytes),
        ]
        for row in shown
    ]
    if len(report.packages) > len(shown):
        rows.append([f"{len(report.packages) - len(shown):,} more", *[""] * 7])
    headers = [
        "package", "by", "files", "size", "GPU code", "slimmable", "never loaded", "their size",
    ]  # fmt: skip
    return format_table("llrrrrrr", headers, rows, drop=(1, 2, 7, 6, 3, 4), drop_empty=True)


def _name(package: Package | None) -> str:
    return _UNOWNED if package is None else f"{package.name} {package.version}".rstrip()


def _summary(report: ImageReport) -> Iterator[str]:
    lines = []
    never = [row for row in report.libraries if row.suite is SuiteUse.NEVER_LOADED]
    if report.run_id is not None:
        lines.append(
            f"Never loaded by run {printable(report.run_id)}: "
            f"{format_items(len(never), 'file', 'files')} of "
            f"{format_bytes(sum(row.size for row in never))}."
        )
    by_arch = [row for row in report.libraries if row.slimmable_by is not None]
    if by_arch and report.devices:
        lines.append(
            "Slimmable by plan or lock: what the suite doesn't need; by arch: code for other GPUs "
            f"than {', '.join(report.devices)}."
        )
    if lines:
        yield "\n".join(lines)
