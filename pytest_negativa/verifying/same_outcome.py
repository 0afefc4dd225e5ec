"""The same outcome of a test as when traced: aspects, verify.tolerate, ends on the originals.

A test that ended otherwise runs on the originals again: ``judge`` knows flaky tests by their ends
there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from pytest_negativa.models.outcomes import Aspect, Outcome, TestResult
from pytest_negativa.models.round import MOST_RERUNS
from pytest_negativa.models.verdict import AspectChange
from pytest_negativa.verifying.rounds import RoundResult


def same_outcome(before: TestResult, after: TestResult, tolerate: Collection[Aspect]) -> bool:
    """Whether outcomes are equal, and all aspects that are not tolerated."""
    return before.outcome is after.outcome and all(
        change.tolerated for change in changed_aspects(before, after, tolerate)
    )


def changed_aspects(
    before: TestResult, after: TestResult, tolerate: Collection[Aspect]
) -> tuple[AspectChange, ...]:
    """The aspects in which two equal outcomes differ; none of outcomes that differ themselves."""
    if before.outcome is not after.outcome:
        return ()
    return tuple(
        AspectChange(
            aspect=aspect,
            before=_only_in(before, after, aspect),
            after=_only_in(after, before, aspect),
            tolerated=aspect in tolerate,
        )
        for aspect in Aspect
        if before.aspects.get(aspect, ()) != after.aspects.get(aspect, ())
    )


def _only_in(test: TestResult, other: TestResult, aspect: Aspect) -> tuple[str, ...]:
    left = Counter(test.aspects.get(aspect, ())) - Counter(other.aspects.get(aspect, ()))
    return tuple(sorted(left.elements()))


Results = Mapping[str, TestResult]
Ends = Mapping[str, tuple[TestResult, ...]]


def ends_of(rounds: Iterable[RoundResult]) -> Ends:
    """By node id: how a test ended, each time that it ran with a sound CUDA context."""
    ends: dict[str, tuple[TestResult, ...]] = defaultdict(tuple)
    for test in chain.from_iterable((*r.session.tests, *r.session.repeats) for r in rounds):
        if not test.doubtful:
            ends[test.nodeid] += (test,)
    return ends


def hurried_tests(before: Results, ends: Ends) -> frozenset[str]:
    """Tests that ran less often than they may, and never otherwise after they ended as traced."""

    def is_seen(nodeid: str) -> bool:
        as_traced = [test.outcome is before[nodeid].outcome for test in ends[nodeid]]
        return as_traced != sorted(as_traced)

    known = before.keys() & ends.keys()
    return frozenset(n for n in known if len(ends[n]) < MOST_RERUNS and not is_seen(n))


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


def accepted_failures(
    before: Results, after: Results, tolerate: Collection[Aspect] = ()
) -> Iterator[str]:
    """Tests that failed alike in both runs, perhaps by chance and before they came to a need."""
    for nodeid, test in after.items():
        failed = test.outcome in (Outcome.FAILED, Outcome.ERROR)
        if failed and nodeid in before and same_outcome(before[nodeid], test, tolerate):
            yield nodeid


def known_of_originals(
    before: Results,
    after: Results,
    ends: Ends,
    tolerate: Collection[Aspect] = (),
    fresh: Collection[str] = (),
) -> frozenset[str]:
    """Tests that did on the originals, too, what they did on the copies.

    What a failure on the copies left behind, such as a stale lock, may make the next run fail, and
    a test may fail because others did not run before it. So an end as on the copies counts only
    after one that is as traced.

    Args:
        fresh: tests that ran in a fresh process on the copies, behind a lost CUDA context.
            If such a test passes there, it may always do so.
    """
    return frozenset(
        nodeid
        for nodeid in undecided_tests(before, after, tolerate)
        if _was_seen(
            before[nodeid], after[nodeid], ends.get(nodeid, ()), tolerate, fresh=nodeid in fresh
        )
    )


def _was_seen(
    before: TestResult,
    after: TestResult,
    ends: tuple[TestResult, ...],
    tolerate: Collection[Aspect],
    *,
    fresh: bool,
) -> bool:
    if after.gpu_error is not None:
        return any(test.gpu_error is not None for test in ends)
    as_traced = [_is_alike(before, test, after, tolerate) for test in ends]
    first = as_traced.index(True) if any(as_traced) else len(ends)
    if fresh and after.outcome is Outcome.PASSED:
        first = 0
    return any(_is_alike(after, test, before, tolerate) for test in ends[first:])


def _is_alike(
    wanted: TestResult, found: TestResult, other: TestResult, tolerate: Collection[Aspect]
) -> bool:
    """Whether a run that kept its CUDA context ended as wanted.

    Args:
        other: the end from which the wanted one must be told. If its outcome is another one, all
            aspects but the type of the error are tolerated.
    """
    if other.outcome is not wanted.outcome:
        tolerate = {*Aspect} - {Aspect.ERROR_TYPE} | {*tolerate}
    return found.gpu_error is None and same_outcome(wanted, found, tolerate)
