"""Rows, sentences and lists of a report, from plans and verdicts, for all formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pytest_negativa.models.plan import Decision, LibraryPlan
from pytest_negativa.models.report import LibraryRow, ProofRow, ReasonRow, RunReport, TrimmedRow
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.verdict import LibraryStatus, Verdict
from pytest_negativa.reporting.units import format_holders, format_items, format_share

# A library of one's own has some dozens; NVIDIA's have thousands, which "negativa kernels" lists.
_MOST_KERNELS_NAMED = 50


def library_row(plan: LibraryPlan) -> LibraryRow:
    """Add up the decisions of a plan."""
    return LibraryRow(
        path=plan.library.path,
        size=plan.library.size,
        code_bytes=plan.code_bytes,
        elements=len(plan.decisions),
        kept=_by_reason(d for d in plan.decisions if d.kept),
        unused=_by_reason(d for d in plan.decisions if not d.kept),
        kernels=len(plan.used_kernels) + len(plan.unused_kernels),
        used_kernels=len(plan.used_kernels),
        first_uses=plan.used_kernels,
        unused_kernels=(
            plan.unused_kernels if len(plan.unused_kernels) <= _MOST_KERNELS_NAMED else ()
        ),
        notes=plan.notes,
        trimmed=TrimmedRow(
            cubins=len(plan.trimmed),
            code_bytes=sum(cubin.code_size for cubin in plan.trimmed),
            unused_bytes=sum(cubin.unused_size for cubin in plan.trimmed),
        )
        if plan.trimmed
        else None,
        is_files=plan.is_files,
    )


def describe_trimmed(row: TrimmedRow) -> str:
    """Unused code inside kept cubins as a sentence; its bytes are in no column of a table."""
    return (
        f"Inside {format_items(row.cubins, 'kept element', 'kept elements')}, "
        f"{format_bytes(row.unused_bytes)} of {format_bytes(row.code_bytes)} code "
        f"({format_share(row.unused_bytes, row.code_bytes)}, unpacked) belongs to kernels that no "
        "test used."
    )


def proof_row(verdict: Verdict) -> ProofRow:
    """Row of a verdict in a report."""
    proved = (row for row in verdict.libraries if row.status is LibraryStatus.PROVED)
    tests = format_items(len(verdict.tests), "test", "tests")
    devices = ", ".join(dict.fromkeys(device.name for device in verdict.devices)) or "no GPU"
    return ProofRow(
        proved=verdict.proved,
        reasons=verdict.reasons,
        proved_bytes=sum(row.unused_bytes for row in proved),
        copies=verdict.copies,
        evidence=f"{tests}, {verdict.gpu_tests:,} of them on the GPU, on {devices}",
        parts=len(verdict.parts),
    )


def describe_unused(report: RunReport) -> str:
    """The largest fact of a report: how much of the GPU code is unused."""
    where = ", ".join(report.devices) or "an unknown device"
    return (
        f"{format_bytes(report.unused_bytes)} of {format_bytes(report.code_bytes)} GPU code "
        f"({format_share(report.unused_bytes, report.code_bytes)}) in "
        f"{format_holders(*report.holders)} is unused on {where}."
    )


def sentences(report: RunReport) -> Iterator[str]:
    """The facts on the whole of a report, the largest first."""
    yield describe_unused(report)
    if report.watched_bytes:
        share = format_share(report.watched_bytes, report.unused_bytes)
        yield f"Watched: no process read {share} of the unused bytes."
    if report.replay is not None:
        yield report.replay
    if report.proof is not None:
        yield describe_proof(report.proof)


def lists(report: RunReport) -> Sequence[tuple[str, Sequence[str]]]:
    """Titles and lines of the lists that are below the tables of a report, also of empty ones."""
    notes = [f"{row.name}: {note}" for row in report.libraries for note in row.notes]
    return (
        ("Compared with the baseline", report.compared),
        ("Kept for lack of knowledge or by policy", notes),
        ("Not covered by the trace, so what it may have used is kept", report.not_covered),
        ("Warnings", report.warnings),
    )


def describe_proof(row: ProofRow) -> str:
    """A verdict as a sentence."""
    if not row.proved:
        return f"Not proved: {'; '.join(row.reasons)}."
    by = f" by {row.parts} parts" if row.parts else ""
    size = format_bytes(row.proved_bytes)
    return (
        f"Proved{by}: the tests end as before without {size} of GPU code, on {row.copies} copies."
    )


def _by_reason(decisions: Iterable[Decision]) -> tuple[ReasonRow, ...]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for decision in decisions:
        sizes[decision.reason].append(decision.size)
    return tuple(
        ReasonRow(reason=reason, elements=len(found), bytes=sum(found))
        for reason, found in sorted(sizes.items())
    )
