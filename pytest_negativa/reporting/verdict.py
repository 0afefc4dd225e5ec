"""Verdicts as text, of a plan and of CPU code: tests, reasons, the conclusion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.settings import Reports
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import size, spans_of_pages
from pytest_negativa.models.verdict import (
    FLAKY_RULE,
    STAYING,
    TESTS_DIFFER,
    AspectChange,
    LibraryStatus,
    ProvedLibrary,
    TestVerdict,
    Verdict,
    Witness,
)
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import and_more, format_items, format_names, format_share

_MAX_TESTS = 20
_MAX_TEXT = 160


def render_verdict(verdict: Verdict, options: Reports) -> Iterator[str]:
    """The verdict, a paragraph at a time; the last one is the conclusion."""
    yield f"\n{' Verification (pytest-negativa) ':=^80}"
    yield from _libraries_of(verdict)
    yield from itemize("Started otherwise than when traced:", verdict.changes)
    yield from _tests("Tests that ended otherwise on the copies:", verdict.differences)
    yield from _tests(
        "Tolerated (verify.tolerate):",
        [test for test in verdict.tests if test.changes and not test.differs],
    )
    yield from _tests(
        f"Flaky ({FLAKY_RULE}):", [test for test in verdict.tests if test.differs and test.flaky]
    )
    for witness in Witness:
        if witness is not Witness.TOUCHED_AGAIN:
            yield from _needs(verdict, witness)
    healed = (
        f"{Path(need.library or '').name} [{span.start:#x}, {span.end:#x}): {need.reason}"
        for need in verdict.needs
        for span in need.spans
        if need.is_healed
    )
    yield from itemize("Healing kept, from now on:", healed)
    yield from itemize("Witnesses:", _witnesses(verdict) if verdict.proved else ())
    yield _conclusion(verdict)


def _needs(verdict: Verdict, witness: Witness) -> Iterator[str]:
    """Needs that a witness shows, without those that were healed or have no known test."""
    details = [
        replace(need, kernel=need.kernel and demangle(need.kernel)).detail
        for need in verdict.needs
        if need.witness is witness and need.test and not need.is_healed
    ]
    yield from itemize(f"{witness.value}:".capitalize(), details, most=_MAX_TESTS)


def _libraries_of(verdict: Verdict) -> Iterator[str]:
    shown = [row for row in verdict.libraries if row.status is not LibraryStatus.NOTHING_UNUSED]
    if shown:
        yield format_table(
            "lrrrrrrl",
            ("library", "GPU code", "unused", "share", "left", "processes", "watched", "verdict"),
            [
                (
                    Path(row.path).name,
                    format_bytes(row.code_bytes),
                    format_bytes(row.unused_bytes),
                    format_share(row.unused_bytes, row.code_bytes),
                    format_bytes(row.left_bytes),
                    f"{row.processes:,}",
                    _watched(row),
                    row.status.value,
                )
                for row in shown
            ],
            drop=(4, 5, 1, 6, 3, 2),
        )
    yield from _remarks(shown)


def _remarks(rows: Iterable[ProvedLibrary]) -> Iterator[str]:
    """Each detail and note once, with the libraries that have it."""
    remarks: dict[str, list[str]] = {}
    for row in rows:
        # That tests differ is said below, once.
        detail = () if row.detail in (None, TESTS_DIFFER) else (row.detail,)
        for text in (*detail, *row.notes):
            remarks.setdefault(text, []).append(Path(row.path).name)
    for text, names in remarks.items():
        yield f"{format_names(map(printable, names))}: {printable(text)}"


def _watched(row: ProvedLibrary) -> str:
    """The share of the removed bytes that was watched, and how many of the elements."""
    share = format_share(row.watched_bytes, row.unused_bytes)
    return f"{share} ({row.watched_elements:,}/{row.unused_elements:,})"


def _tests(title: str, tests: Sequence[TestVerdict]) -> Iterator[str]:
    """A paragraph about tests; none without any."""
    lines = [title]
    for test in tests[:_MAX_TESTS]:
        before, after = (
            "did not run" if outcome is None else outcome.value
            for outcome in (test.before, test.after)
        )
        lines.append(f"  {printable(test.nodeid)}: {before} -> {after}")
        if test.text is not None:
            lines.append(f"    {printable(test.text)[:_MAX_TEXT]}")
        lines += map(_change, test.changes)
        if test.gpu_error is not None:
            lines.append(f"    left the CUDA context with {test.gpu_error}")
        if test.libraries and test.after is not None:
            names = (printable(Path(path).name) for path in test.libraries)
            lines.append(f"    was the first to use kernels of {format_names(names)}")
    lines += and_more(len(tests), _MAX_TESTS, "  and {} more")
    if tests:
        yield "\n".join(lines)


def _change(change: AspectChange) -> str:
    before, after = (
        printable("; ".join(texts))[:_MAX_TEXT] or "nothing"
        for texts in (change.before, change.after)
    )
    return f"    {change.aspect.value}: {before} -> {after}"


def _witnesses(verdict: Verdict) -> Iterator[str]:
    """What speaks for a proof, and what none of it sees."""
    rows = [r for r in verdict.libraries if r.status is LibraryStatus.PROVED]
    yield "the driver's word: it refused nothing on the copies alone"
    if watched := sum(r.watched_bytes for r in rows):
        share = format_share(watched, sum(r.unused_bytes for r in rows))
        elements = (sum(r.watched_elements for r in rows), sum(r.unused_elements for r in rows))
        yield (
            f"touches: none of the {format_bytes(watched)} ({share}) that was watched, in "
            f"{elements[0]:,} of {elements[1]:,} elements"
        )
    else:
        yield "touches: no removed code was watched"
    stays = any(need.witness in STAYING for need in verdict.needs)
    repeated = "what the traced run used was used on the copies"
    yield f"the same work: {repeated}{', or stays whole' if stays else ''}"
    outcomes = "all as in the traced run"
    if any(t.differs for t in verdict.tests):
        outcomes += ", but for flaky tests"
    if any(c.tolerated for t in verdict.tests for c in t.changes):
        outcomes += ", but for tolerated differences"
    yield f"outcomes: {outcomes}"
    named = ", but for what is noted" if any(r.notes for r in rows) else ""
    yield f"nobody else: no process was seen on an original{named}"
    yield (
        "not seen: reads of unwatched code that the driver is not asked for, and what the page "
        "Limits of the documentation lists"
    )


def _conclusion(verdict: Verdict) -> str:
    if verdict.proved:
        where = ", ".join(sorted({d.name for d in verdict.devices}))
        rows = [r for r in verdict.libraries if r.status is LibraryStatus.PROVED]
        code = sum(r.code_bytes for r in rows)
        left = sum(r.left_bytes for r in rows)
        failed = sum(t.before == t.after in (Outcome.FAILED, Outcome.ERROR) for t in verdict.tests)
        doubt = f" ({failed:,} of them failed, and may need more)" if failed else ""
        text = (
            f"PROVED: {format_bytes(code - left)} of {format_bytes(code)} GPU code in "
            f"{format_items(len(rows), 'library', 'libraries')} is not needed by "
            f"{format_items(len(verdict.tests), 'test', 'tests')}{doubt} on {where}.\n"
            f"{format_bytes(left)} ({format_share(left, code)}) is left."
        )
        before = sum(r.size for r in rows)
        after = sum(r.size if r.copy_size is None else r.copy_size for r in rows)
        if after < before:
            text += (
                f" The files: {format_bytes(before)} -> {format_bytes(after)} "
                f"({format_share(before - after, before)} less)."
            )
        return text
    return "\n".join(("NOT PROVED:", *(f"  - {printable(one)}" for one in verdict.reasons)))


def render_cpu(verdict: Verdict) -> Iterator[str]:
    """What a verdict says of CPU code, a paragraph at a time; the last one is the conclusion."""
    yield f"\n{' Verification of CPU code (pytest-negativa) ':=^80}"
    left = (Path(row.path).name for row in verdict.libraries if row.pages is None)
    yield from itemize("Left out: not loaded, or not watched, by both runs:", left, most=_MAX_TESTS)
    yield from _needs(verdict, Witness.TOUCHED_AGAIN)
    # Those of GPU code were shown with it.
    differences = () if verdict.gpu_libraries else verdict.differences
    yield from _tests("Tests that ended otherwise:", differences)
    yield describe_cpu(verdict)


def describe_cpu(verdict: Verdict) -> str:
    """What a verdict says of CPU code as a sentence, with a line for each reason against it."""
    if verdict.cpu_reasons:
        return "\n".join(itemize("CPU code is not proved:", verdict.cpu_reasons))
    proved = [spans_of_pages(row.pages) for row in verdict.libraries if row.pages is not None]
    return (
        f"Proved on {printable(verdict.versions['processor'])}: no test needs "
        f"{format_bytes(sum(map(size, proved)))} of CPU code in "
        f"{format_items(len(proved), 'library', 'libraries')}."
    )
