"""Switches the witnesses of a verdict off, one by one, and counts the faults that slip through.

The faults are those of the recorded attempts; see ``tests.support.attempts``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

from msgspec import structs

from pytest_negativa.models.verdict import Verdict
from pytest_negativa.verifying import judge as judging
from pytest_negativa.verifying.evidence import Attempt
from pytest_negativa.verifying.tripwire import Touches
from tests.support.attempts import read_recorded

_Change = Callable[[Attempt], Attempt]


def _facts(**changes: object) -> _Change:
    return lambda attempt: dataclasses.replace(attempt, **changes)  # type: ignore[arg-type]


def _without_loads(attempt: Attempt) -> Attempt:
    loads = dataclasses.replace(attempt.loads, originals={}, incomplete=None)
    return dataclasses.replace(attempt, loads=loads)


def _without_refusals(attempt: Attempt) -> Attempt:
    return dataclasses.replace(attempt, usage=structs.replace(attempt.usage, refusals=()))


def _evidence(real: Callable[[Attempt], judging.TestEvidence]) -> Any:
    """Tests that all ended as when traced."""

    def changed(attempt: Attempt) -> judging.TestEvidence:
        found = real(attempt)
        return dataclasses.replace(
            found, after=found.before, on_originals=(), statuses=(None, None)
        )

    return changed


def _nothing(*_arguments: object, **_options: object) -> tuple[object, ...]:
    return ()


# What changes the facts, and what stands in for a function of ``judge``.
WITNESSES: dict[str, tuple[_Change | None, dict[str, Any]]] = {
    "what the driver refused": (_without_refusals, {}),
    "touches of armed code": (_facts(touches=Touches()), {}),
    "the same work and start": (
        None,
        {"compare_work": _nothing, "changes_of_start": _nothing},
    ),
    "outcomes of tests": (None, {"evidence_of_tests": _evidence(judging.evidence_of_tests)}),
    "ends of processes": (None, {"reasons_of_ends": _nothing}),
    "logs of the redirect and traces: who loaded an original": (_without_loads, {}),
    "opens, holders and twins of originals and copies": (_facts(opened={}), {}),
    "collection, changed copies, processes of earlier rounds": (_facts(problems=()), {}),
}


def judge_without(attempt: Attempt, witnesses: Collection[str]) -> Verdict:
    """The verdict that an attempt would get without some witnesses."""
    with contextlib.ExitStack() as stack:
        for name in witnesses:
            change, functions = WITNESSES[name]
            attempt = attempt if change is None else change(attempt)
            for function, stand_in in functions.items():
                stack.enter_context(mock.patch.object(judging, function, stand_in))
        return judging.judge(attempt)


def count_faults() -> Iterator[tuple[str, int, int]]:
    """By witness: how many of the refused attempts it refuses without the others, and it alone."""
    refused = [
        recorded.attempt
        for attempts in read_recorded().values()
        for recorded in attempts
        if not recorded.verdict.proved
    ]
    caught, alone = Counter[str](), Counter[str]()
    base = [judge_without(attempt, WITNESSES).proved for attempt in refused]
    for name in WITNESSES:
        others = WITNESSES.keys() - {name}
        for attempt, proved in zip(refused, base, strict=True):
            caught[name] += proved and not judge_without(attempt, others).proved
            alone[name] += judge_without(attempt, {name}).proved
    for name in WITNESSES:
        yield name, caught[name], alone[name]
    rest = len(base) - sum(base)
    yield "GPU, its compute capability, and copies that were loaded", rest, rest
    yield "all", len(base), len(base)


if __name__ == "__main__":
    for row in count_faults():
        print(*row, sep="\t")
