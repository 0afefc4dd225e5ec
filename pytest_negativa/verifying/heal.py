"""Healing: code that was refused or touched by a proof is given back; when healing ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.verdict import NEEDS, Need, Verdict
from pytest_negativa.planning.keep_needed import find_needed, keep_needed
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
    healed: list[Need] = []
    while True:
        verdict = judge(verification.attempt(planned))
        seen = [need for need in verdict.unmet if need.witness in NEEDS]
        needed = tuple(find_needed(planned, seen))
        if not needed:
            reasons = verdict.reasons if verdict.proved else (*verdict.reasons, UNNAMED)
            return replace(verdict, needs=(*verdict.needs, *healed), healing=True, reasons=reasons)
        healed += needed
        planned = [dataclasses.replace(p, plan=keep_needed(p.plan, needed)) for p in planned]
        verification.keep(needed)
