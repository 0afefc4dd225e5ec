"""A run's report as Markdown, for a job summary or a comment on a change."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import RunReport
from pytest_negativa.reporting.rows import describe_trimmed
from pytest_negativa.reporting.units import format_bytes, format_share


def render_markdown(report: RunReport) -> str:
    """The report as one Markdown document."""
    lines = [
        "# GPU code used by the tests",
        "",
        f"{format_bytes(report.unused_bytes)} of {format_bytes(report.code_bytes)} "
        f"({format_share(report.unused_bytes, report.code_bytes)}) is unused on "
        f"{', '.join(report.devices) or 'an unknown device'}.",
        "",
    ]
    if report.replay is not None:
        lines += [report.replay, ""]
    lines += [
        "| library | GPU code | unused | | wrong arch | no used kernel | kernels | used |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report.libraries:
        cells = [
            f"`{Path(row.path).name}`".replace("|", "\\|"),
            format_bytes(row.code_bytes),
            format_bytes(row.unused_bytes),
            format_share(row.unused_bytes, row.code_bytes),
            format_bytes(row.unused_bytes_by(UnusedReason.WRONG_ARCH.value)),
            format_bytes(row.unused_bytes_by(UnusedReason.NO_USED_KERNEL.value)),
            f"{row.kernels:,}",
            f"{row.used_kernels:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if report.trimmed is not None:
        lines += ["", describe_trimmed(report.trimmed)]
    for title, items in (
        ("Notes", [f"`{Path(r.path).name}`: {n}" for r in report.libraries for n in r.notes]),
        ("Not covered by the trace", report.not_covered),
        ("Warnings", report.warnings),
        ("Thresholds crossed", report.crossed),
    ):
        if items:
            lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
    return "\n".join(lines) + "\n"
