"""The verdict of combined runs, from verdicts on parts of the tests. No I/O.

A part was proved without all that its copies lacked. So it is proved, too, without any less of it:
a united plan is proved if it removes nothing that the copies of a part still had. A part that never
loaded a library says nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.plan import LibraryPlan, TrimmedCubin, may_be
from pytest_negativa.models.reconstruction import FILL
from pytest_negativa.models.spans import common, covers, size, union
from pytest_negativa.models.trace import Usage
from pytest_negativa.models.verdict import (
    LibraryStatus,
    ProvedLibrary,
    Verdict,
)


class VerifiedPart(NamedTuple):
    """A run that was united with others.

    Attributes:
        usage: what it loaded.
        verdict: None if it was not verified.
    """

    usage: Usage
    verdict: Verdict | None

    @property
    def name(self) -> str:
        """The ids of its runs, for people."""
        return ", ".join(self.usage.run_ids)


def unite_verdicts(
    run_id: str, planned: Sequence[AnalyzedLibrary], parts: Sequence[VerifiedPart]
) -> Verdict:
    """The verdict on the plans of a run that unites parts.

    Args:
        run_id: of the united run.
        planned: its libraries.
        parts: those with tests. A part that loaded none of the libraries needs no proof.
    """
    parts = [
        part
        for part in parts
        if part.verdict is not None or any(_loaded(part.usage, one.plan) for one in planned)
    ]
    proofs = [part.verdict for part in parts if part.verdict is not None]
    reasons = list(_why_not_proved(parts))
    rows = tuple(_unite_rows(one, parts, agreed=not reasons) for one in planned)
    return Verdict(
        run_id=run_id,
        proved=not reasons,
        reasons=tuple(reasons),
        command=(),
        exit_status=None,
        fill=proofs[0].fill if proofs else FILL,
        copies="; ".join(sorted({proof.copies for proof in proofs})),
        granularity="; ".join(sorted({proof.granularity for proof in proofs})),
        gpu_tests=sum(proof.gpu_tests for proof in proofs),
        created_ns=max((proof.created_ns for proof in proofs), default=0),
        devices=tuple(dict.fromkeys(chain(*(proof.devices for proof in proofs)))),
        versions={
            name: ", ".join(sorted({proof.versions.get(name, "none") for proof in proofs}))
            for name in sorted({name for proof in proofs for name in proof.versions})
        },
        libraries=rows,
        tests=tuple(chain(*(proof.tests for proof in proofs))),
        rounds=tuple(chain(*(proof.rounds for proof in proofs))),
        changes=tuple(dict.fromkeys(chain(*(proof.changes for proof in proofs)))),
        needs=tuple(chain(*(proof.needs for proof in proofs))),
        parts=tuple(sorted({run_id for part in parts for run_id in part.usage.run_ids})),
    )


def _why_not_proved(parts: Sequence[VerifiedPart]) -> Iterator[str]:
    ways = {}
    for part in parts:
        if (verdict := part.verdict) is None:
            yield f"{part.name}: it was not verified"
            continue
        if not {*(verdict.parts or [verdict.run_id])} <= {*part.usage.run_ids}:
            yield f"{part.name}: its verdict is on another run, {verdict.run_id}"
        elif not verdict.proved:
            yield f"{part.name}: not proved: {'; '.join(verdict.reasons)}"
        ways[f"{verdict.granularity} granularity on {verdict.copies} copies"] = part.name
    if len(ways) > 1:
        each = "; ".join(f"{name}: {way}" for way, name in sorted(ways.items()))
        yield f"the runs were proved in different ways: {each}"


def _unite_rows(
    one: AnalyzedLibrary, parts: Sequence[VerifiedPart], *, agreed: bool
) -> ProvedLibrary:
    """The row of a library that the parts have proved together.

    Args:
        agreed: every part is proved.
    """
    plan = one.plan
    rows, detail = [], None
    for part in parts:
        known = () if part.verdict is None else part.verdict.gpu_libraries
        mine = [row for row in known if row.sha256 == plan.library.sha256]
        rows += mine
        if not mine and _loaded(part.usage, plan):
            detail = f"{part.name} may need it, and has no proof of it"
        for row in mine:
            if row.status in (LibraryStatus.NOT_PROVED, LibraryStatus.NOT_SUBSTITUTED):
                detail = f"{part.name}: {row.status.value}: {row.detail}"
    if not rows:
        detail = detail or "no run proved it"
    spans = common(row.spans for row in rows)
    unused = [d for d in plan.decisions if not d.kept and covers(spans, d.start, d.end)]
    trimmed = {
        cubin.start: cubin.unused
        for cubin in plan.trimmed
        if all(_trimmed_alike(cubin, plan, row) for row in rows)
    }
    status = LibraryStatus.PROVED if agreed and detail is None else LibraryStatus.NOT_PROVED
    if not plan.unused_bytes and not plan.trimmed:
        status = LibraryStatus.NOTHING_UNUSED
    unused_bytes = sum(d.size for d in unused)
    return replace(
        ProvedLibrary.unproved(plan),
        status=status,
        detail=detail,
        unused_bytes=unused_bytes,
        unused_elements=len(unused),
        trimmed_code_bytes=sum(map(size, trimmed.values())),
        left_bytes=plan.code_bytes - unused_bytes,
        processes=sum(row.processes for row in rows),
        spans=spans,
        trimmed=trimmed,
    )


def _loaded(usage: Usage, plan: LibraryPlan) -> bool:
    """Whether a run loaded a library, or may have: nothing tells who reads files of GPU code."""
    return plan.is_files or any(may_be(used.library, plan.library) for used in usage.libraries)


def _trimmed_alike(cubin: TrimmedCubin, plan: LibraryPlan, row: ProvedLibrary) -> bool:
    """Whether the copy had nothing of a cubin, or just what the plan leaves of it.

    Any other cubin is another program to the driver.
    """
    if union(row.trimmed.get(cubin.start, ())) == union(cubin.unused):
        return True
    return any(covers(row.spans, d.start, d.end) for d in plan.decisions if d.start == cubin.start)
