"""What the tests did when they ran on the originals again; ``judge`` tells flaky tests by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_negativa.models.outcomes import Aspect, TestResult
from pytest_negativa.models.trace import Usage
from pytest_negativa.verifying.same_outcome import same_outcome

Results = Mapping[str, TestResult]


@dataclass(frozen=True, slots=True)
class OriginalRound:
    """A round on the originals: all tests as the command runs them, or those that aren't flaky.

    Attributes:
        tests: by node id: how they ended.
        usage: the GPU code that they used.
        complete: every process came to its end.
    """

    tests: Results
    usage: Usage
    complete: bool


@dataclass(frozen=True, slots=True)
class OriginalRuns:
    """All reruns on the originals.

    Attributes:
        alone: by node id: how a test ended when only some tests ran.
        together: rounds of all tests.
        without_flaky: rounds of all tests that were not flaky.
    """

    alone: Mapping[str, tuple[TestResult, ...]] = field(default_factory=dict)
    together: tuple[OriginalRound, ...] = ()
    without_flaky: tuple[OriginalRound, ...] = ()


def undecided_tests(
    before: Results, after: Results, tolerate: Collection[Aspect] = ()
) -> Iterator[str]:
    """Tests that may behave on the originals as they did on the copies.

    These ended otherwise, or ended as traced and lost their CUDA context. A test that
    did both is left out: its other outcome follows from the lost context.

    Args:
        before, after: in the traced run, and on the copies.
        tolerate: what equal outcomes may differ in.
    """
    for nodeid, test in after.items():
        if nodeid in before:
            differs = not same_outcome(before[nodeid], test, tolerate)
            lost = test.gpu_error is not None
            if differs != lost:
                yield nodeid


def known_of_originals(
    before: Results, after: Results, runs: OriginalRuns, tolerate: Collection[Aspect] = ()
) -> frozenset[str]:
    """Tests that did on the originals, too, what they did on the copies.

    A test that runs alone may end otherwise because it needs an earlier one. So its reruns alone
    count only if they gave both outcomes. The traced run counts with the rounds of all tests.

    What a failure on the copies left behind, such as a stale lock, may make the next run fail, too.
    So a rerun alone counts only after one that ended as traced.
    """
    return frozenset(
        nodeid
        for nodeid in undecided_tests(before, after, tolerate)
        if _was_seen(before[nodeid], after[nodeid], runs, tolerate)
    )


def needs_other_tests(
    before: Results, after: Results, runs: OriginalRuns, tolerate: Collection[Aspect] = ()
) -> bool:
    """Whether a test ends otherwise alone, and no round of all tests has told more."""
    known = known_of_originals(before, after, runs, tolerate)
    return any(
        nodeid not in known
        and _is_among(after[nodeid], runs.alone.get(nodeid, ()), before[nodeid], tolerate)
        and not any(nodeid in r.tests for r in runs.together)
        for nodeid in undecided_tests(before, after, tolerate)
    )


def sound_rounds(
    before: Results,
    rounds: Collection[OriginalRound],
    flaky: Collection[str],
    tolerate: Collection[Aspect] = (),
    losing: Collection[str] = (),
) -> tuple[OriginalRound, ...]:
    """The rounds in which each test that is not flaky ended as in the traced run.

    A round in which a test lost its CUDA context does not show what its tests choose. A round
    that was not traced completely does not show what it left out.

    Args:
        losing: tests that lost their CUDA context on the copies and on the originals alike.
    """
    wanted = {nodeid: test for nodeid, test in before.items() if nodeid not in flaky}
    return tuple(
        r
        for r in rounds
        if r.complete
        and not r.usage.incomplete
        and all(
            n in r.tests
            and same_outcome(test, r.tests[n], tolerate)
            and (r.tests[n].gpu_error is None or n in losing)
            for n, test in wanted.items()
        )
    )


def rounds_without_flaky(
    before: Results,
    runs: OriginalRuns,
    flaky: Collection[str],
    tolerate: Collection[Aspect] = (),
    losing: Collection[str] = (),
) -> tuple[OriginalRound, ...]:
    """The sound rounds in which no flaky test ran, see ``sound_rounds``."""
    rounds = [r for r in runs.without_flaky if r.tests.keys().isdisjoint(flaky)]
    return sound_rounds(before, rounds, flaky, tolerate, losing)


def _was_seen(
    before: TestResult, after: TestResult, runs: OriginalRuns, tolerate: Collection[Aspect]
) -> bool:
    alone = runs.alone.get(after.nodeid, ())
    together = tuple(r.tests[after.nodeid] for r in runs.together if after.nodeid in r.tests)
    if after.gpu_error is not None:
        return any(test.gpu_error is not None for test in (*alone, *together))
    if _is_among(after, together, before, tolerate):
        return True
    ended_as_traced = [_is_among(before, (test,), after, tolerate) for test in alone]
    first = ended_as_traced.index(True) if any(ended_as_traced) else len(alone)
    return _is_among(after, alone[first:], before, tolerate)


def _is_among(
    wanted: TestResult,
    results: tuple[TestResult, ...],
    other: TestResult,
    tolerate: Collection[Aspect],
) -> bool:
    """Whether a run that kept its CUDA context ended as wanted.

    Args:
        other: the end from which the wanted one must be told. If its outcome is another one, all
            aspects but the type of the error are tolerated.
    """
    if other.outcome is not wanted.outcome:
        tolerate = {*Aspect} - {Aspect.ERROR_TYPE} | {*tolerate}
    return any(test.gpu_error is None and same_outcome(wanted, test, tolerate) for test in results)
