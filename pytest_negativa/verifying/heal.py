"""Healing: what code is given back (refused or touched by a proof), and when healing ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Element
from pytest_negativa.models.plan import Decision, UnusedReason
from pytest_negativa.models.verdict import NEEDS, NeededSpan, Verdict, WorkDifference
from pytest_negativa.planning.keep_needed import iter_removed, keep_needed_spans, of_each_path
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.verification import Verification

UNNAMED = (
    "healing ended: no more removed code was refused or touched; mend what the other reasons name. "
    "If tests differ, trace and heal with one command, which watches more code, or keep their "
    "libraries (keep.libraries)"
)
"""Reason for which nothing is given back although the plan is not proved."""


def verify_and_heal(verification: Verification) -> Verdict:
    """Verify; give back what a process was refused or touched, and verify again.

    It ends, since each turn gives back more. The verdict is that of the plans as they are saved.
    """
    planned: Sequence[AnalyzedLibrary] = verification.traced.planned
    needed: list[NeededSpan] = []
    verdict = judge(verification.attempt(planned))
    libraries = [one.plan.library for one in planned]
    while not verdict.proved and (
        spans := of_each_path(_needed_spans(planned, verdict), libraries)
    ):
        needed += spans
        planned = [dataclasses.replace(p, plan=keep_needed_spans(p.plan, spans)) for p in planned]
        verification.keep(spans)
        verdict = judge(verification.attempt(planned))
    if verdict.proved and not needed:
        return verdict
    reasons = verdict.reasons if verdict.proved else (*verdict.reasons, UNNAMED)
    return replace(verdict, healed=tuple(needed), reasons=reasons)


def _needed_spans(planned: Sequence[AnalyzedLibrary], verdict: Verdict) -> Iterator[NeededSpan]:
    """The removed code that was touched, or that the driver was asked for by name."""
    seen = [d for d in verdict.other_work if d.kind in NEEDS]
    for one in planned if seen else ():
        path = one.plan.library.path
        decisions = {decision.start: decision for decision in one.plan.decisions}
        for block in iter_removed(one.library_map, one.plan):
            decision = decisions[block.payload.start]
            names = one.library_map.functions_of(block.content)
            work = next(
                (
                    d
                    for d in seen
                    if d.library == path
                    and _lies_in(block, decision, d)
                    and (d.kernel is None or d.kernel in names)
                ),
                None,
            )
            if work is not None:
                yield NeededSpan(
                    library=path,
                    start=decision.start,
                    end=decision.end,
                    # Locks repeat it, so it names no id of a process.
                    test=work.nodeid or "a process",
                    found_by=work.kind,
                )


def _lies_in(block: Element, decision: Decision, work: WorkDifference) -> bool:
    image = None if work.image is None else int(work.image, 16)
    # What was touched itself is needed, whatever its arch; else the driver would never choose it.
    return image == decision.start or (
        image in (None, block.anchor) and decision.reason != UnusedReason.WRONG_ARCH.value
    )
