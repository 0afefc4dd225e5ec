"""``negativa inspect --packages`` as text: tables of packages and files, what is slimmable."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pytest_negativa.models.image import (
    ImageLibrary,
    ImageReport,
    PackageRow,
    SuiteUse,
)
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_foreign, format_items, format_share


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
        yield format_table(
            "llrrrrrr",
            (
                "package",
                "by",
                "files",
                "size",
                "GPU code",
                "slimmable",
                "never loaded",
                "their size",
            ),
            first_rows(report.packages, top, _package_name, _package_cells),
            drop=(1, 2, 7, 6, 3, 4),
            drop_empty=True,
        )
        never = [row for row in libraries if row.suite is SuiteUse.NEVER_LOADED]
        if report.run_id is not None:
            yield (
                f"Never loaded by run {printable(report.run_id)}: "
                f"{format_items(len(never), 'file', 'files')} of "
                f"{format_bytes(sum(row.size for row in never))}."
            )
        if report.devices and any(row.slimmable_by is not None for row in libraries):
            yield (
                "Slimmable by plan or lock: what the suite doesn't need; by arch: code for other "
                f"GPUs than {', '.join(report.devices)}."
            )
        if report.run_id is None and not report.devices:
            yield (
                "--run RUN (a traced run) or --lock FILE adds the columns by the suite and "
                "slimmable; --arch sm_90 adds slimmable alone."
            )
    if report.hidden:
        yield (
            f"Upper layers hide {format_items(report.hidden, 'file', 'files')} of code "
            f"({format_bytes(report.hidden_bytes)}), which the image still carries. They are not "
            "counted above. Remove files in the layer that adds them."
        )
    slimmed = format_items(len(report.slimmed), "file was", "files were")
    title = (
        f"{slimmed} slimmed by negativa slim; only the GPU code that is left counts, and none "
        "of it is slimmable:"
    )
    yield from itemize(title, report.slimmed, most=top)
    yield from itemize("Notes:", report.notes)


def _library_table(report: ImageReport, top: int) -> str:
    # In an environment all paths begin alike.
    shown = report.libraries[: top or None]
    common = os.path.commonpath([os.path.dirname(row.path) for row in shown])  # noqa: PTH120
    rows = first_rows(
        report.libraries,
        top,
        lambda row: os.path.relpath(row.path, common) if common else row.path,
        _file_cells,
    )
    table = format_table(
        "llrrrrl",
        ("file", "by the suite", "size", "GPU code", "slimmable", "", "by"),
        rows,
        total=["total", "", *_figures(report.libraries), ""],
        drop=(2, 5, 6, 1, 3),
        drop_empty=True,
    )
    # A long path as a header would make the table wider than the terminal.
    return f"Files below {printable(common)}:\n{table}" if common else table


def _file_cells(name: str, rows: Sequence[ImageLibrary]) -> list[str]:
    use, by = (rows[0].suite, rows[0].slimmable_by) if len(rows) == 1 else (None, None)
    return [name, use.value if use else "-", *_figures(rows), by.value if by else "-"]


def _figures(rows: Sequence[ImageLibrary]) -> list[str]:
    code = sum(row.code_bytes for row in rows)
    known = [row.slimmable_bytes for row in rows if row.slimmable_bytes is not None]
    return [
        format_bytes(sum(row.size for row in rows)),
        format_bytes(code),
        format_bytes(sum(known)) if known else "-",
        format_share(sum(known), code) if known else "-",
    ]


def _package_cells(name: str, rows: Sequence[PackageRow]) -> list[str]:
    managers = {row.package.manager.value if row.package else "" for row in rows}
    slimmable = [row.slimmable_bytes for row in rows if row.slimmable_bytes is not None]
    never = sum(row.never_loaded for row in rows)
    return [
        name,
        managers.pop() if len(managers) == 1 else "",
        f"{sum(row.libraries + row.code_files for row in rows):,}",
        format_bytes(sum(row.size for row in rows)),
        format_bytes(sum(row.code_bytes for row in rows)),
        format_bytes(sum(slimmable)) if slimmable else "-",
        f"{never:,}" if never else "-",
        format_bytes(sum(row.never_loaded_bytes for row in rows)) if never else "-",
    ]


def _package_name(row: PackageRow) -> str:
    package = row.package
    return "(no package)" if package is None else f"{package.name} {package.version}".rstrip()
