"""A proof on several kinds of copies, one after the other, and the verdict on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from pytest_negativa.models.settings import CopyKind, Settings
from pytest_negativa.models.verdict import (
    Healing,
    LibraryStatus,
    ProvedLibrary,
    TestVerdict,
    Verdict,
)
from pytest_negativa.verifying.heal import verify_and_heal
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.traced_run import load_libraries
from pytest_negativa.verifying.verification import Verification


def verify_kinds(verification: Verification, settings: Settings) -> Verdict:
    """Verify on each kind of copies that ``settings`` ask for; the verdict holds for all of them.

    A kind on which nothing is proved is the last. If healing gave code back on a later kind, the
    proof begins again: it holds for one plan alone.
    """
    kinds = settings.verify.copies.kinds
    traced = verification.traced
    verdicts: list[Verdict] = []
    healings: list[Healing] = []
    while len(verdicts) < len(kinds) and all(verdict.proved for verdict in verdicts):
        kind = kinds[len(verdicts)]
        if len(kinds) > 1:
            number = f"{len(verdicts) + 1} of {len(kinds)}"
            verification.say(f"negativa: proving on {kind.value} copies ({number})")
        verification.go_on_with(kind, traced)
        if settings.healing:
            verdict = verify_and_heal(verification)
        else:
            verdict = judge(verification.attempt(traced.planned))
        if verdict.healing is not None:
            healings.append(verdict.healing)
        # Healing saves the plans that it changes.
        before = traced.plans
        if settings.healing:
            traced = dataclasses.replace(traced, planned=load_libraries(traced.run))
        if verdicts and verdict.proved and traced.plans != before:
            verification.say("negativa: the plan has changed: proving again on all kinds of copies")
            verdicts.clear()
        else:
            verdicts.append(verdict)
    return join_verdicts(kinds, verdicts, healings)


def join_verdicts(
    kinds: Sequence[CopyKind], verdicts: Sequence[Verdict], healings: Sequence[Healing] = ()
) -> Verdict:
    """The verdict on all kinds of copies.

    Args:
        kinds: what was asked for.
        verdicts: one for each kind that was tried, in the same order.
        healings: how all searches went.
    """
    last = verdicts[-1]
    if len(kinds) == 1:
        return last
    reasons = [f"on {one.copies} copies: {reason}" for one in verdicts for reason in one.reasons]
    reasons += [f"the tests did not run on {k.value} copies" for k in kinds[len(verdicts) :]]
    return replace(
        last,
        proved=not reasons,
        reasons=tuple(reasons),
        copies=CopyKind.BOTH.value,
        gpu_tests=min(one.gpu_tests for one in verdicts),
        libraries=tuple(_join_rows(verdicts)),
        tests=tuple(_join_tests(verdicts)),
        healing=_join_healings(healings),
        work=tuple(difference for one in verdicts for difference in one.work),
        parts=tuple(verdicts),
    )


def _join_rows(verdicts: Sequence[Verdict]) -> Iterable[ProvedLibrary]:
    """The rows of the last kind, or of the first kind on which the library is not proved."""
    by_path: dict[str, list[ProvedLibrary]] = {}
    for row in (row for one in reversed(verdicts) for row in one.libraries):
        by_path.setdefault(row.path, []).append(row)
    for last, *others in by_path.values():
        rows = (*reversed(others), last)
        yield next((row for row in rows if row.status is not LibraryStatus.PROVED), last)


def _join_tests(verdicts: Sequence[Verdict]) -> Iterable[TestVerdict]:
    """The tests that differ on any kind come first."""
    found: dict[str, TestVerdict] = {}
    for test in sorted((test for one in verdicts for test in one.tests), key=_speaks):
        found.setdefault(test.nodeid, test)
    return found.values()


def _speaks(test: TestVerdict) -> tuple[bool, bool]:
    return not (test.differs and not test.flaky), not test.differs


def _join_healings(healings: Sequence[Healing]) -> Healing | None:
    if not healings:
        return None
    return Healing(
        needed=tuple(span for one in healings for span in one.needed),
        runs=sum(one.runs for one in healings),
        seconds=sum(one.seconds for one in healings),
        complete=all(one.complete for one in healings),
        reason="; ".join(dict.fromkeys(one.reason for one in healings if one.reason)) or None,
    )
