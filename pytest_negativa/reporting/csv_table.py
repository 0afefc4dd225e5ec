"""A run's libraries as CSV: one row each, sizes in bytes."""

from __future__ import annotations

import csv
import io

from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import LibraryRow, RunReport
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
