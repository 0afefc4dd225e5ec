"""Healing: gives back the removed code that a proof saw needed, keeps it, and verifies again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import (
    NEEDS,
    FoundBy,
    NeededSpan,
    Verdict,
    WorkDifference,
    WorkKind,
)
from pytest_negativa.planning.keep_needed import (
    Part,
    functions_of,
    iter_parts,
    keep_needed_spans,
    of_each_path,
)
from pytest_negativa.storage.results import load_healed, save_healed, save_plans
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.verification import Verification

UNNAMED = (
    "healing ended: no more removed code was refused or touched; mend what the other reasons name. "
    "If tests differ, trace and heal with one command, which watches more code, or keep their "
    "libraries (keep.libraries)"
)
"""Reason for which nothing is given back although the plan is not proved."""

_FOUND_BY = {WorkKind.REFUSED: FoundBy.REFUSAL, WorkKind.TOUCHED: FoundBy.TOUCH}


def verify_and_heal(verification: Verification) -> Verdict:
    """Verify; give back what a process was refused or touched, and verify again.

    It ends, since each turn gives back more. The verdict is that of the plans as they are saved.
    """
    run = verification.traced.run
    planned: Sequence[AnalyzedLibrary] = verification.traced.planned
    needed: list[NeededSpan] = []
    verdict = judge(verification.attempt(planned))
    libraries = [one.plan.library for one in planned]
    while not verdict.proved and (
        spans := of_each_path(_needed_spans(planned, verdict), libraries)
    ):
        needed += spans
        planned = [dataclasses.replace(p, plan=keep_needed_spans(p.plan, spans)) for p in planned]
        save_healed(run, (*load_healed(run), *spans))
        save_plans(run, [p.plan for p in planned])
        verdict = judge(verification.attempt(planned))
    if verdict.proved and not needed:
        return verdict
    reasons = verdict.reasons if verdict.proved else (*verdict.reasons, UNNAMED)
    return replace(verdict, healed=tuple(needed), reasons=reasons)


def _needed_spans(planned: Sequence[AnalyzedLibrary], verdict: Verdict) -> list[NeededSpan]:
    """The removed code that was touched, or that the driver was asked for by name."""
    seen = [d for d in verdict.other_work if d.kind in NEEDS]
    return [span for library in planned if seen for span in _needed_of(library, seen)]


def _needed_of(planned: AnalyzedLibrary, seen: Sequence[WorkDifference]) -> Iterator[NeededSpan]:
    library_map, decisions = planned.library_map, planned.plan.decisions
    contents = {block.payload.start: block.content for block in library_map.iter_code()}
    ends = {decision.start: decision.end for decision in decisions}
    # The driver would never choose it.
    wrong_arch = {d.start for d in decisions if d.reason == UnusedReason.WRONG_ARCH.value}
    for part in iter_parts(library_map, planned.plan):
        wanted = [d for d in seen if d.library == part.library and _lies_in(part, d, wrong_arch)]
        if not wanted:
            continue
        function = None
        if part.code is None:
            kernels = library_map.kernels_of(contents[part.start])
            names = {kernel.name for kernel in kernels}
        else:
            found = functions_of(library_map, part.start, Span(part.code, part.code + 1))
            function, names = next(iter(found), None), set(found)
        work = next((w for w in wanted if w.kernel is None or w.kernel in names), None)
        if work is not None:
            yield NeededSpan(
                library=part.library,
                start=part.start,
                end=ends[part.start],
                # Locks repeat it, so it names no id of a process.
                test=work.nodeid or "a process",
                region=part.region,
                code=part.code,
                function=function,
                found_by=_FOUND_BY[work.kind],
            )


def _lies_in(part: Part, work: WorkDifference, wrong_arch: set[int]) -> bool:
    if work.image is None:
        return part.start not in wrong_arch
    image = int(work.image, 16)
    # What was touched itself is needed, whatever its arch.
    return image == part.start or (image == part.region and part.start not in wrong_arch)
