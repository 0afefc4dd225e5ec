"""Which tests are flaky: the originals alone decide."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import Aspect, Outcome, TestResult
from pytest_negativa.models.round import MOST_RERUNS
from pytest_negativa.verifying.judge import TestEvidence, judge_tests, reasons_of_tests
from pytest_negativa.verifying.same_outcome import (
    Ends,
    hurried_tests,
    known_of_originals,
    undecided_tests,
)
from tests.support.faults import PlantedFault

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
LOST = "CUDA_ERROR_ILLEGAL_ADDRESS"


def one(outcome: Outcome, gpu_error: str | None = None) -> dict[str, TestResult]:
    return {"a": TestResult(nodeid="a", outcome=outcome, duration=0, gpu_error=gpu_error)}


def ends(*results: TestResult) -> Ends:
    return {"a": results}


@pytest.mark.parametrize(
    ("seen", "flaky"),
    [
        ((), False),
        ((PASSED, PASSED, PASSED), False),
        # It may need a test that ran before it.
        ((FAILED, FAILED, FAILED), False),
        ((PASSED, FAILED), True),
        ((FAILED, PASSED, FAILED), True),
        # It may fail for what its failure on the copies left behind.
        ((FAILED, PASSED), False),
        # Neither outcome in question.
        ((PASSED, Outcome.SKIPPED, Outcome.ERROR), False),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(PASSED, FAILED), (FAILED, PASSED)])
def test_the_originals_alone_make_a_test_flaky(
    before: Outcome, after: Outcome, seen: Sequence[Outcome], flaky: bool
) -> None:
    if before is FAILED:
        swapped = {PASSED: FAILED, FAILED: PASSED}
        seen = [swapped.get(o, o) for o in seen]
    results = [one(outcome)["a"] for outcome in seen]
    known = known_of_originals(one(before), one(after), ends(*results))
    assert known == (frozenset("a") if flaky else frozenset())


def test_a_test_may_always_pass_in_a_fresh_process() -> None:
    failed, passed = one(FAILED), one(PASSED)
    for fresh in (), ("a",):
        known = known_of_originals(failed, passed, ends(passed["a"]), fresh=fresh)
        assert known == frozenset(fresh)
    assert not known_of_originals(passed, failed, ends(failed["a"]), fresh=("a",))


def test_a_test_that_ran_too_rarely_is_named() -> None:
    before, after = one(PASSED), one(FAILED)
    passed, failed = before["a"], after["a"]
    for seen, is_hurried in (
        ([passed] * 3, True),
        ([failed] * 2 + [passed] * 3, True),
        ([failed, passed, failed], False),
        ([passed, failed], False),
        ([passed] * MOST_RERUNS, False),
    ):
        found = hurried_tests(before, ends(*seen))
        assert found == (frozenset("a") if is_hurried else frozenset())
    evidence = TestEvidence(
        before=before, after=after, on_originals=(), used={}, gpu_tests=1,
        traced_on=("9.0",), verified_on=("9.0",), hurried=("a",),
    )  # fmt: skip
    other, why, _ = reasons_of_tests(evidence, judge_tests(evidence))
    assert other.startswith("1 test ended with another outcome")
    assert why.startswith("1 test of these ran fewer than 20 times") and "--negativa-rerun" in why


def test_a_lost_context_is_rerun_where_nothing_else_differs() -> None:
    assert list(undecided_tests(one(PASSED), one(PASSED))) == []
    assert list(undecided_tests(one(PASSED), one(FAILED))) == ["a"]
    assert list(undecided_tests(one(PASSED), one(PASSED, LOST))) == ["a"]
    assert list(undecided_tests(one(PASSED), one(FAILED, LOST))) == [], "never flaky"
    assert list(undecided_tests({}, one(FAILED))) == []


def test_reruns_that_lost_their_context() -> None:
    lost = replace(one(FAILED)["a"], gpu_error=LOST)
    known = known_of_originals(one(PASSED), one(FAILED), ends(lost, *one(PASSED).values()))
    assert known == frozenset(), "such an outcome means nothing"
    passed = one(PASSED, LOST)
    assert known_of_originals(one(PASSED), passed, ends(passed["a"])) == {"a"}
    assert known_of_originals(one(PASSED), passed, ends(*one(PASSED).values())) == frozenset()


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
