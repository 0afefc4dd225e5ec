"""Switches the witnesses of a verdict off, one by one, and counts the faults that slip through.

The faults are those of the recorded attempts; see ``tests.support.attempts``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
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


class Caught(NamedTuple):
    """Refused attempts, by the node ids of the tests that made them.

    Attributes:
        witness: the words for it.
        caught: those that it refuses without the others.
        alone: those that are proved without it.
    """

    witness: str
    caught: list[str]
    alone: list[str]


def caught_faults() -> Iterator[Caught]:
    """By witness: what it refuses; in the end what is refused without any, and all."""
    refused = [
        recorded
        for attempts in read_recorded().values()
        for recorded in attempts
        if not recorded.verdict.proved
    ]
    left = [r for r in refused if judge_without(r.attempt, WITNESSES).proved]
    for name in WITNESSES:
        others = WITNESSES.keys() - {name}
        caught = [r.test for r in left if not judge_without(r.attempt, others).proved]
        alone = [r.test for r in refused if judge_without(r.attempt, {name}).proved]
        yield Caught(name, caught, alone)
    rest = [r.test for r in refused if r not in left]
    yield Caught("GPU, its compute capability, and copies that were loaded", rest, rest)
    every = [r.test for r in refused]
    yield Caught("all", every, every)


if __name__ == "__main__":
    for row in caught_faults():
        print(row.witness, len(row.caught), len(row.alone), sep="\t")
