"""A verdict on CPU code as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.models.verdict import PageVerdict
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_bytes, format_items

_MAX_ROWS = 20


def render_page_verdict(verdict: PageVerdict) -> Iterator[str]:
    """The verdict, a paragraph at a time; the last one is the conclusion."""
    yield f"\n{' Verification of CPU code (pytest-negativa) ':=^80}"
    against = [row for row in verdict.libraries if row.detail is not None]
    for row in against[:_MAX_ROWS]:
        spans = ", ".join(f"{span.start:#x}-{span.end:#x}" for span in row.missed[:5])
        at = f" (file offsets {spans})" if spans else ""
        yield f"{printable(Path(row.path).name)}: {printable(row.detail or '')}{at}"
    differs = [test for test in verdict.tests if test.differs and not test.flaky]
    for test in differs[:_MAX_ROWS]:
        before, after = (o.value if o else "not run" for o in (test.before, test.after))
        yield f"{printable(test.nodeid)}: {before} when traced, now {after}"
    if len(against) > _MAX_ROWS:
        yield f"and {format_items(len(against) - _MAX_ROWS, 'library', 'libraries')} more"
    yield "\n".join(map(printable, verdict.limits))
    yield describe_page_verdict(verdict)


def describe_page_verdict(verdict: PageVerdict) -> str:
    """A verdict on CPU code as a sentence, with a line for each reason against it."""
    libraries = format_items(len(verdict.covered), "library", "libraries")
    size = sum(row.untouched_bytes for row in verdict.covered)
    what = f"{format_bytes(size)} of CPU code in {libraries}"
    if verdict.proved:
        return f"Proved on {printable(verdict.processor.model)}: no test needs {what}."
    return itemize(f"Not proved that no test needs {what}:", verdict.reasons)
