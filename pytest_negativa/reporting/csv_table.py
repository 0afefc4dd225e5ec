"""A run's report as CSV, sizes in bytes: a row for each library, and for each distribution's files
that are GPU code themselves.
"""

from __future__ import annotations

import csv
import io

from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import CodeFilesRow, LibraryRow, RunReport
from pytest_negativa.reporting.escapes import escape_csv

_COLUMNS = (
    "library",
    "size",
    "gpu_code",
    "unused",
    "unused_wrong_arch",
    "unused_no_used_kernel",
    "elements",
    "kept_elements",
    "kernels",
    "used_kernels",
)


def render_csv(report: RunReport) -> str:
    """The rows with a header; lines end as RFC 4180 has it."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_COLUMNS)
    writer.writerows(map(_cells, report.libraries))
    writer.writerows(map(_cells_of_files, report.code_files))
    return out.getvalue()


def _cells(row: LibraryRow) -> list[object]:
    return [
        escape_csv(row.path),
        row.size,
        row.code_bytes,
        row.unused_bytes,
        row.unused_bytes_by(UnusedReason.WRONG_ARCH.value),
        row.unused_bytes_by(UnusedReason.NO_USED_KERNEL.value),
        row.elements,
        row.kept_elements,
        row.kernels,
        row.used_kernels,
    ]


def _cells_of_files(row: CodeFilesRow) -> list[object]:
    figures = [row.size, row.code_bytes, row.unused_bytes]
    return [escape_csv(row.name), *figures, *[""] * (len(_COLUMNS) - 1 - len(figures))]
