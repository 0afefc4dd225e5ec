"""Which tests are flaky: the originals alone decide."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import Aspect, Outcome, TestResult
from pytest_negativa.models.trace import UsageWarning
from pytest_negativa.verifying.judge import TestEvidence, judge_tests, reasons_of_tests
from pytest_negativa.verifying.originals import (
    OriginalRound,
    OriginalRuns,
    known_of_originals,
    needs_other_tests,
    rounds_without_flaky,
    sound_rounds,
    undecided_tests,
)
from tests.support.faults import PlantedFault
from tests.support.usages import usage_of

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
LOST = "CUDA_ERROR_ILLEGAL_ADDRESS"


def one(outcome: Outcome, gpu_error: str | None = None) -> dict[str, TestResult]:
    return {"a": TestResult(nodeid="a", outcome=outcome, duration=0, gpu_error=gpu_error)}


def runs(alone: Sequence[Outcome] = (), together: Sequence[Outcome] = ()) -> OriginalRuns:
    return OriginalRuns(
        {"a": tuple(one(outcome)["a"] for outcome in alone)},
        tuple(OriginalRound(one(outcome), usage_of(), complete=True) for outcome in together),
    )


@pytest.mark.parametrize(
    ("alone", "together", "flaky"),
    [
        ((), (), False),
        ((PASSED, PASSED, PASSED), (), False),
        # It may need a test that ran before it.
        ((FAILED, FAILED, FAILED), (), False),
        ((PASSED, FAILED), (), True),
        ((FAILED, PASSED, FAILED), (), True),
        # It may fail for what its failure on the copies left behind.
        ((FAILED, PASSED), (), False),
        ((FAILED, FAILED, PASSED), (PASSED,), False),
        ((FAILED, PASSED), (FAILED,), True),
        ((FAILED,), (FAILED,), True),
        ((FAILED,), (PASSED,), False),
        # Neither outcome in question.
        ((PASSED, Outcome.SKIPPED), (Outcome.ERROR,), False),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(PASSED, FAILED), (FAILED, PASSED)])
def test_the_originals_alone_make_a_test_flaky(
    before: Outcome,
    after: Outcome,
    alone: Sequence[Outcome],
    together: Sequence[Outcome],
    flaky: bool,
) -> None:
    if before is FAILED:
        swapped = {PASSED: FAILED, FAILED: PASSED}
        alone = [swapped.get(o, o) for o in alone]
        together = [swapped.get(o, o) for o in together]
    known = known_of_originals(one(before), one(after), runs(alone, together))
    assert known == (frozenset("a") if flaky else frozenset())


def test_a_test_that_ends_otherwise_alone_needs_a_round_of_all() -> None:
    before, after = one(PASSED), one(FAILED)
    assert not needs_other_tests(before, after, runs([PASSED] * 3))
    assert needs_other_tests(before, after, runs([FAILED]))
    assert needs_other_tests(before, after, runs([FAILED, PASSED]))
    assert not needs_other_tests(before, after, runs([PASSED, FAILED]))
    assert not needs_other_tests(before, after, runs([FAILED], [PASSED]))


def test_only_a_sound_round_shows_what_the_originals_leave_out() -> None:
    before = one(PASSED)
    sound = OriginalRound(before, usage_of(), complete=True)
    gap = UsageWarning(code="gap", text="the detector was off", process=0)
    others = (
        OriginalRound(before, usage_of(incomplete=[gap]), complete=True),
        OriginalRound(before, usage_of(), complete=False),
        OriginalRound({}, usage_of(), complete=True),
        OriginalRound(one(FAILED), usage_of(), complete=True),
        OriginalRound(one(PASSED, LOST), usage_of(), complete=True),
    )
    rounds = (sound, *others)
    assert sound_rounds(before, rounds, flaky=()) == (sound,)
    assert sound_rounds(before, rounds, flaky=("a",)) == (sound, *others[2:])
    # It does so on the copies, too.
    assert sound_rounds(before, rounds, flaky=(), losing=("a",)) == (sound, others[-1])


def test_a_round_without_flaky_tests_is_sound_for_the_others() -> None:
    before = {**one(PASSED), "b": replace(one(PASSED)["a"], nodeid="b")}
    only_b, both = (
        OriginalRound(tests, usage_of(), complete=True) for tests in ({"b": before["b"]}, before)
    )
    runs = OriginalRuns(without_flaky=(only_b, both))
    assert rounds_without_flaky(before, runs, flaky=("a",)) == (only_b,)
    assert rounds_without_flaky(before, runs, flaky=("b",)) == (), "a did not run, or b did"
    needs_a = OriginalRound({"b": replace(before["b"], outcome=FAILED)}, usage_of(), complete=True)
    assert rounds_without_flaky(before, OriginalRuns(without_flaky=(needs_a,)), ("a",)) == ()


def test_a_lost_context_is_rerun_where_nothing_else_differs() -> None:
    assert list(undecided_tests(one(PASSED), one(PASSED))) == []
    assert list(undecided_tests(one(PASSED), one(FAILED))) == ["a"]
    assert list(undecided_tests(one(PASSED), one(PASSED, LOST))) == ["a"]
    assert list(undecided_tests(one(PASSED), one(FAILED, LOST))) == [], "never flaky"
    assert list(undecided_tests({}, one(FAILED))) == []


def test_reruns_that_lost_their_context() -> None:
    lost = replace(one(FAILED)["a"], gpu_error=LOST)
    known = known_of_originals(
        one(PASSED), one(FAILED), OriginalRuns({"a": (lost, *one(PASSED).values())})
    )
    assert known == frozenset(), "such an outcome means nothing"
    passed = one(PASSED, LOST)
    assert known_of_originals(one(PASSED), passed, OriginalRuns({"a": (passed["a"],)})) == {"a"}
    assert known_of_originals(one(PASSED), passed, runs([PASSED])) == frozenset()


@pytest.mark.planted_fault(
    "A test that always loses its CUDA context, and passes, fails on the copies alone",
    says="1 test ended with another outcome than in the traced run",
)
def test_a_lost_context_explains_no_other_outcome(fault: PlantedFault) -> None:
    before, after, sound = one(PASSED), one(FAILED, LOST), one(PASSED)["a"]
    known = known_of_originals(before, after, ends(*one(PASSED, LOST).values()))
    evidence = TestEvidence(
        before={**before, "b": replace(sound, nodeid="b")},
        after={**after, "b": replace(sound, nodeid="b")},
        on_originals=known,
        used={},
        gpu_tests=1,
        traced_on=("9.0",),
        verified_on=("9.0",),
    )
    fault.check("; ".join(reasons_of_tests(evidence, judge_tests(evidence))))


def ends(*results: TestResult) -> OriginalRuns:
    return OriginalRuns({"a": results})


def skipped(error: str) -> TestResult:
    aspects = {Aspect.ERROR_TYPE: (error,)}
    return TestResult(nodeid="a", outcome=Outcome.SKIPPED, duration=0, aspects=aspects)


def failed(error: str, attempts: str = "1") -> TestResult:
    aspects = {Aspect.ERROR_TYPE: (error,), Aspect.ATTEMPTS: (attempts,)}
    return TestResult(nodeid="a", outcome=FAILED, duration=0, aspects=aspects)


def test_an_error_is_flaky_if_the_originals_gave_both() -> None:
    old, new, third = skipped("old"), skipped("new"), skipped("third")
    assert known_of_originals({"a": old}, {"a": new}, ends(old, new)) == {"a"}
    # An error that is another one each time makes no test flaky: verify.tolerate is for that.
    assert known_of_originals({"a": old}, {"a": new}, ends(third, old)) == frozenset()
    tolerate = (Aspect.ERROR_TYPE,)
    assert list(undecided_tests({"a": old}, {"a": new}, tolerate)) == []


def test_a_failure_is_another_one_if_its_error_is_of_another_type() -> None:
    passed, numbers, gpu = one(PASSED)["a"], failed("AssertionError"), failed("RuntimeError")
    assert known_of_originals({"a": passed}, {"a": gpu}, ends(passed, numbers)) == frozenset()
    known = known_of_originals({"a": passed}, {"a": gpu}, ends(passed, numbers), tuple(Aspect))
    assert known == {"a"}
    # How often it was tried says nothing of another outcome.
    again = failed("RuntimeError", attempts="2")
    assert known_of_originals({"a": passed}, {"a": gpu}, ends(passed, again)) == {"a"}
