"""A run's figures as names and values, for files that hold properties."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_negativa.models.report import RunReport
from pytest_negativa.reporting.text import printable


def iter_properties(report: RunReport) -> Iterator[tuple[str, str]]:
    """The totals, a few figures of each row, and crossed thresholds; sizes in bytes."""
    yield "negativa.devices", printable(", ".join(report.devices))
    yield "negativa.gpu_code", str(report.code_bytes)
    yield "negativa.unused", str(report.unused_bytes)
    for row in report.libraries:
        name = f"negativa.library.{printable(row.name)}"
        yield f"{name}.gpu_code", str(row.code_bytes)
        yield f"{name}.unused", str(row.unused_bytes)
        yield f"{name}.kernels", str(row.kernels)
        yield f"{name}.used_kernels", str(row.used_kernels)
    for limit in report.crossed:
        yield "negativa.crossed", printable(limit)
