"""A run's report as annotations of GitHub Actions (10 warnings at most): lines in the log.

Source: docs.github.com, "Workflow commands for GitHub Actions". GitHub shows ten errors and ten
warnings of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.report import RunReport
from pytest_negativa.reporting.rows import describe_proof, describe_unused
from pytest_negativa.reporting.text import escape_github, escape_github_property
from pytest_negativa.reporting.units import and_more, format_items, format_names

_MOST = 10


def render_annotations(report: RunReport) -> Iterator[str]:
    """The lines: crossed thresholds, gaps in the trace, unused kernels, one line of totals."""
    for limit in report.crossed:
        yield _command("error", limit, title="GPU code: threshold crossed")
    if report.proof is not None and not report.proof.proved:
        yield _command("error", describe_proof(report.proof), title="GPU code")
    warnings = [_command("warning", gap, title="GPU code not traced") for gap in report.not_covered]
    warnings += [line for library in report.coverage for line in _unused(library)]
    shown = warnings if len(warnings) <= _MOST else warnings[: _MOST - 1]
    yield from shown
    for text in and_more(
        len(warnings), len(shown), "{} more places have kernels that no test used"
    ):
        yield _command("warning", text, title="GPU code")
    text = describe_unused(report)
    if report.proof is not None and report.proof.proved:
        text += f" {describe_proof(report.proof)}"
    yield _command("notice", text, title="GPU code")


def _unused(library: LibraryCoverage) -> Iterator[str]:
    """A line for each source line with unused kernels, or for the library without such lines."""
    name = Path(library.path).name
    places: defaultdict[tuple[str, int] | None, list[str]] = defaultdict(list)
    for kernel in library.kernels:
        if not kernel.is_run:
            place = (kernel.file, kernel.line) if kernel.file and kernel.line else None
            places[place].append(demangle(kernel.name))
    for place, kernels in sorted(places.items(), key=lambda item: item[0] or ("", 0)):
        title = format_items(len(kernels), "unused kernel", "unused kernels")
        at = {} if place is None else {"file": place[0], "line": str(place[1])}
        text = f"{format_names(kernels, 1)} of {name}: no test used this kernel"
        yield _command("warning", text, title=title, **at)


def _command(kind: str, text: str, **properties: str) -> str:
    given = ",".join(f"{k}={escape_github_property(v)}" for k, v in sorted(properties.items()))
    return f"::{kind} {given}::{escape_github(text)}"
