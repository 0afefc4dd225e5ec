"""Lines of ``tests.jsonl`` to outcomes: every way in which a test or a session can end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.outcomes import (
    AnyOutcomeRecord as Line,
)
from pytest_negativa.models.outcomes import (
    Aspect,
    Outcome,
    PhaseReported,
    SessionFinished,
    SessionResult,
    SessionStarted,
    TestResult,
    TestStarted,
)
from pytest_negativa.storage.jsonl import LineWriter
from pytest_negativa.storage.outcomes import (
    by_nodeid,
    count_ended,
    fold,
    read_outcomes,
    unite_tests,
)

SECOND = 10**9
BEGIN = SessionStarted(command=("pytest", "-q"), time_ns=0)


def start(nodeid: str, at: int = 1) -> TestStarted:
    return TestStarted(nodeid=nodeid, time_ns=at * SECOND)


ENDS = st.lists(
    st.builds(
        TestResult,
        nodeid=st.sampled_from(("a", "b")),
        outcome=st.sampled_from(tuple(Outcome)),
        duration=st.sampled_from((0.5, 1.5)),
        markers=st.sampled_from(((), ("gpu",), ("gpu", "slow"))),
        aspects=st.sampled_from(({}, {Aspect.SUBTESTS: ("x",), Aspect.ERROR_TYPE: ("y",)})),
    ),
    max_size=4,
)


@given(ENDS, ENDS, ENDS)
def test_sessions_are_united_in_any_order(
    first: list[TestResult], second: list[TestResult], third: list[TestResult]
) -> None:
    whole = unite_tests([first, second, third])
    assert unite_tests([unite_tests([third, first]), second, whole]) == whole
    for end in (*first, *second, *third):
        [united] = (one for one in whole if one.nodeid == end.nodeid)
        assert set(end.markers) <= set(united.markers)
        assert end.outcome is not Outcome.CRASHED or united.outcome is Outcome.CRASHED


def phase(
    nodeid: str,
    when: str,
    outcome: str = "passed",
    *,
    at: int = 1,
    xfail: bool = False,
    worker: str | None = None,
    error: str | None = None,
) -> PhaseReported:
    return PhaseReported(
        nodeid=nodeid,
        when=when,
        outcome=outcome,
        duration=0.5,
        time_ns=at * SECOND,
        expected_failure=xfail,
        worker=worker,
        text=None if outcome == "passed" else f"{when} {outcome}",
        gpu_error=error,
    )


def whole(nodeid: str, worker: str | None = None, error: str | None = None) -> list[Line]:
    """A test that passes, or fails with a CUDA error."""
    outcome = "passed" if error is None else "failed"
    return [
        start(nodeid),
        phase(nodeid, "setup", worker=worker),
        phase(nodeid, "call", outcome, worker=worker, error=error),
        phase(nodeid, "teardown", worker=worker),
    ]


def end(status: int = 0, *, lost: bool = False) -> SessionFinished:
    return SessionFinished(exit_status=status, time_ns=9 * SECOND, context_lost=lost)


def session(*records: Line, cut_short: Outcome = Outcome.CRASHED) -> SessionResult:
    return fold([BEGIN, *records], cut_short)


def outcomes(result: SessionResult) -> dict[str, Outcome]:
    return {test.nodeid: test.outcome for test in result.tests}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([("setup", "passed", False), ("call", "passed", False)], Outcome.PASSED),
        ([("setup", "passed", False), ("call", "failed", False)], Outcome.FAILED),
        ([("setup", "skipped", False)], Outcome.SKIPPED),
        ([("setup", "passed", False), ("call", "skipped", False)], Outcome.SKIPPED),
        ([("setup", "passed", False), ("call", "skipped", True)], Outcome.XFAILED),
        ([("setup", "passed", False), ("call", "passed", True)], Outcome.XPASSED),
        ([("setup", "failed", False)], Outcome.ERROR),
        # A failure in the test tells more than one after it.
        (
            [("setup", "passed", False), ("call", "failed", False), ("teardown", "failed", False)],
            Outcome.FAILED,
        ),
        ([("call", "passed", False), ("teardown", "failed", False)], Outcome.ERROR),
        # pytest-rerunfailures: the last attempt counts.
        ([("call", "rerun", False), ("call", "passed", False)], Outcome.PASSED),
        # pytest-xdist's word for a worker that crashed.
        ([("???", "failed", False)], Outcome.CRASHED),
    ],
)
def test_how_a_test_ends(phases: list[tuple[str, str, bool]], expected: Outcome) -> None:
    records: list[Line] = [start("a")]
    records += [phase("a", when, outcome, xfail=xfail) for when, outcome, xfail in phases]
    if phases[-1][0] not in ("???", "teardown"):
        records.append(phase("a", "teardown"))
    assert outcomes(session(*records, end())) == {"a": expected}


def aspects_of(*records: Line) -> Mapping[Aspect, tuple[str, ...]]:
    [test] = session(start("a"), *records, phase("a", "teardown"), end()).tests
    return test.aspects


PASSED = phase("a", "call")
SKIPPED = phase("a", "call", "skipped")
FAILED = phase("a", "call", "failed")


def test_attempts_are_told_whether_or_not_a_plugin_reports_each() -> None:
    # pytest-rerunfailures reports each, and begins the test anew.
    reported = aspects_of(
        phase("a", "call", "rerun"), start("a"), replace(PASSED, attempt=2)
    )[Aspect.ATTEMPTS]  # fmt: skip
    assert reported == (
        "call passed at attempt 2", "call rerun", "start", "start", "teardown passed",
    )  # fmt: skip
    # flaky reports the last one.
    assert aspects_of(replace(PASSED, attempt=3))[Aspect.ATTEMPTS] == (
        "call passed at attempt 3",
        "start",
        "teardown passed",
    )
    # The phase of a crash is a report of pytest-xdist's controller alone.
    assert aspects_of(phase("a", "???", "failed"))[Aspect.ATTEMPTS] == ("start", "teardown passed")


def test_a_node_id_that_is_there_twice_has_the_reports_of_both() -> None:
    [test] = session(*whole("a"), *whole("a"), end()).tests
    assert test.aspects[Aspect.ATTEMPTS].count("start") == 2
    assert test.aspects[Aspect.ATTEMPTS].count("call passed") == 2


@pytest.mark.parametrize(
    ("outcome", "xfail", "of_test", "of_subtest"),
    [
        ("passed", False, Outcome.PASSED, "passed"),
        ("failed", False, Outcome.FAILED, "failed"),
        # It does not make its test skipped.
        ("skipped", False, Outcome.PASSED, "skipped"),
        ("skipped", True, Outcome.PASSED, "xfailed"),
    ],
)
def test_a_subtest(outcome: str, xfail: bool, of_test: Outcome, of_subtest: str) -> None:
    part = replace(phase("a", "call", outcome, xfail=xfail), subtest="[] (i=1)")
    found = aspects_of(part, PASSED)
    assert found[Aspect.SUBTESTS] == (of_subtest,)
    assert found[Aspect.SUBTEST_NAMES] == (f"[] (i=1) {of_subtest}",)
    assert found[Aspect.ATTEMPTS] == ("call passed", "start", "teardown passed")
    result = session(start("a"), part, PASSED, phase("a", "teardown"), end())
    assert outcomes(result) == {"a": of_test}


def test_types_of_errors() -> None:
    assert aspects_of(replace(SKIPPED, error_type="Skipped"))[Aspect.ERROR_TYPE] == ("Skipped",)
    xfailed = replace(SKIPPED, expected_failure=True, error_type="KeyError")
    assert aspects_of(xfailed)[Aspect.ERROR_TYPE] == ("KeyError",)
    assert aspects_of(replace(FAILED, error_type="KeyError"))[Aspect.ERROR_TYPE] == ("KeyError",)
    rerun = replace(phase("a", "call", "rerun"), error_type="KeyError")
    assert Aspect.ERROR_TYPE not in aspects_of(rerun, PASSED)


@pytest.mark.parametrize("cut_short", [Outcome.CRASHED, Outcome.TIMED_OUT])
@pytest.mark.parametrize("seen", range(3))
def test_a_session_that_dies_in_a_test(cut_short: Outcome, seen: int) -> None:
    begun: list[Line] = [start("b")]
    begun += [phase("b", "setup"), phase("b", "call")][:seen]
    result = session(*whole("a"), *begun, cut_short=cut_short)
    assert outcomes(result) == {"a": Outcome.PASSED, "b": cut_short}
    assert result.exit_status is None
    assert not any(test.doubtful for test in result.tests)


def test_a_failure_before_the_crash_does_not_hide_it() -> None:
    result = session(start("a"), phase("a", "setup"), phase("a", "call", "failed"))
    assert outcomes(result) == {"a": Outcome.CRASHED}
    assert result.tests[0].text == "call failed"


def test_a_session_that_stops_itself_in_a_test_says_nothing_of_it() -> None:
    """As after Ctrl-C."""
    [test] = session(start("a"), phase("a", "setup"), end(2)).tests
    assert test.doubtful


def test_after_a_lost_context_a_worker_says_nothing_more() -> None:
    result = session(
        *whole("a", "gw0"),
        *whole("b", "gw0", error="CUDA_ERROR_ILLEGAL_ADDRESS"),
        *whole("c", "gw0"),
        *whole("d", "gw1"),
        end(1, lost=True),
    )
    assert {test.nodeid: test.doubtful for test in result.tests} == {
        "a": False,
        "b": False,
        "c": True,
        "d": False,
    }
    assert by_nodeid(result.tests)["b"].gpu_error == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert result.context_lost


def write(path: Path, lines: Iterable[bytes], torn: bytes = b"") -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines) + torn)
    return path


def lines(*records: Line) -> list[bytes]:
    return [msgspec.json.encode(record) for record in records]


def test_a_torn_last_line_is_no_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "t", lines(BEGIN, *whole("a"), start("b")), b'{"record":"pha')
    assert outcomes(read_outcomes(path)) == {"a": Outcome.PASSED, "b": Outcome.CRASHED}
    assert outcomes(read_outcomes(path, cut_short=Outcome.TIMED_OUT))["b"] is Outcome.TIMED_OUT


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x\n" + b"".join(line + b"\n" for line in lines(BEGIN)), "t:1: not a record"),
        (b"\xff\xfe\n\n", "t:1: not a record"),
        (b'{"record":"other"}\n\n', "t:1: not a record"),
        (
            b'{"record":"session","format":9,"command":[],"time_ns":0}\n',
            r"t:1: .* of this release: Invalid enum value 9 - at `\$.format`; trace again",
        ),
        (
            b'{"record":"session","format_version":5,"command":[],"time_ns":0}\n',
            "t:1: .* unknown field `format_version`; trace again",
        ),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(StoreError, match=reason):
        read_outcomes(tmp_path / "t")


def test_a_file_is_followed_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    assert count_ended(path) == 0
    writer = LineWriter(path)
    for record in (BEGIN, start("a"), phase("a", "call"), phase("a", "teardown"), start("b")):
        writer.write(record)
    assert count_ended(path) == 1
    writer.write(phase("b", "teardown"))
    assert count_ended(path) == 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_outcomes(tmp_path / "t")
