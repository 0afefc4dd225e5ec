"""A run's report as Markdown, for a job summary or a comment on a change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.rows import describe_trimmed, lists, sentences
from pytest_negativa.reporting.text import escape_markdown, markdown_code
from pytest_negativa.reporting.units import format_share


def render_markdown(report: RunReport) -> str:
    """The report as one Markdown document."""
    lines = ["# GPU code used by the tests", ""]
    for sentence in sentences(report):
        lines += [escape_markdown(sentence), ""]
    lines += [
        "| library | GPU code | unused | | for other GPUs | no used kernel | kernels | used |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report.libraries:
        cells = [
            markdown_code(row.name),
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
    lines += _coverage(report.coverage)
    for title, items in (*lists(report), ("Thresholds crossed", report.crossed)):
        if items:
            lines += ["", f"## {title}", "", *(f"- {escape_markdown(item)}" for item in items)]
    return "\n".join(lines) + "\n"


def _coverage(coverage: Sequence[LibraryCoverage]) -> Iterator[str]:
    """A table of the project's own kernels; nothing without any."""
    if not coverage:
        return
    word = "run" if all(library.counted for library in coverage) else "looked up"
    yield from ("", "## Kernel coverage", "")
    yield f"| library | source file or namespace | kernels | {word} | |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for library in coverage:
        name = markdown_code(Path(library.path).name)
        for group, kernels in library.groups().items():
            run, count = sum(kernel.is_run for kernel in kernels), len(kernels)
            shown = markdown_code(group) if group else ""
            yield f"| {name} | {shown} | {count:,} | {run:,} | {format_share(run, count)} |"
