"""Outcomes that are equal, and what they may differ in all the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pytest_negativa.models.outcomes import Aspect, Outcome, TestResult
from pytest_negativa.models.verdict import AspectChange
from pytest_negativa.settings.options import BY_NAME
from pytest_negativa.verifying.judge import TestEvidence, judge_tests, reasons_of_tests
from pytest_negativa.verifying.same_outcome import changed_aspects, same_outcome
from tests.support.faults import PlantedFault
from tests.support.verified import VerifiedProject


def result(outcome: Outcome = Outcome.PASSED, **aspects: tuple[str, ...]) -> TestResult:
    known = {Aspect[name.upper()]: texts for name, texts in aspects.items()}
    return TestResult(nodeid="a", outcome=outcome, duration=0, aspects=known)


ONCE = result(attempts=("call passed", "start"))
TWICE = result(attempts=("call passed", "start", "start"))


def test_only_what_differs_is_told() -> None:
    assert same_outcome(ONCE, ONCE, ()) and changed_aspects(ONCE, ONCE, ()) == ()
    change = AspectChange(aspect=Aspect.ATTEMPTS, before=(), after=("start",))
    assert changed_aspects(ONCE, TWICE, ()) == (change,)
    assert not same_outcome(ONCE, TWICE, ())


def test_a_tolerated_difference_is_told_too() -> None:
    assert same_outcome(ONCE, TWICE, (Aspect.ATTEMPTS,))
    [change] = changed_aspects(ONCE, TWICE, (Aspect.ATTEMPTS,))
    assert change.tolerated and change.after == ("start",)
    assert not same_outcome(ONCE, TWICE, (Aspect.ERROR_TYPE,))


def test_another_outcome_is_never_tolerated() -> None:
    failed = result(Outcome.FAILED, attempts=("call failed", "start"))
    assert not same_outcome(ONCE, failed, tuple(Aspect))
    assert changed_aspects(ONCE, failed, ()) == ()


def test_the_verdict_names_the_aspects_and_the_setting() -> None:
    skipped = result(Outcome.SKIPPED, error_type=("Skipped",))
    other = result(Outcome.SKIPPED, error_type=("Skipped (CUDA error)",))
    evidence = TestEvidence(
        before={"a": ONCE, "b": skipped, "c": ONCE},
        after={"a": TWICE, "b": other, "c": ONCE},
        on_originals=(),
        used={},
        gpu_tests=1,
        traced_on=["9.0"],
        verified_on=["9.0"],
    )
    assert list(reasons_of_tests(evidence, judge_tests(evidence))) == [
        "2 tests ended with the same outcome as in the traced run, but not alike; if that is no "
        "fault, set verify.tolerate: [attempts, error-type]"
    ]
    tolerant = dataclasses.replace(evidence, tolerate=(Aspect.ATTEMPTS, Aspect.ERROR_TYPE))
    verdicts = judge_tests(tolerant)
    assert list(reasons_of_tests(tolerant, verdicts)) == []
    assert [len(v.changes) for v in verdicts] == [1, 1, 0]


def test_the_option_names_all_aspects() -> None:
    named = BY_NAME["verify.tolerate"].value
    assert named == "{" + ",".join(aspect.value for aspect in Aspect) + "}"


# ---- With the real plugins ----

# Each test ends with the same outcome, whatever FAULT is.
SUITE = """
TRIES = []

def tries():
    TRIES.append(1)
    return len(TRIES)

def test_use():
    use(LIB)

@pytest.mark.flaky(reruns=2)
def test_rerun():
    assert FAULT != "rerun" or tries() == 2

def test_subtests(subtests):
    for number in range(2):
        with subtests.test("part", number=number + (FAULT == "names")):
            if FAULT == "subtests" and number:
                pytest.skip("not on this GPU")

def test_twice():
    pass

def test_skip():
    pytest.skip(f"no kernel image is available" if FAULT == "skip" else f"{os.getpid()}")

@pytest.mark.xfail(reason="bug 1")
def test_xfail():
    if FAULT == "xfail":
        pytest.xfail("bug 2")
    raise RuntimeError("other") if FAULT == "error" else AssertionError(id(TRIES))

@pytest.mark.xfail
def test_xfail_of_one_type():
    try:
        raise RuntimeError("CUDA error: invalid device function" if FAULT == "text" else "bug 3")
    except RuntimeError as e:
        raise ValueError(f"it failed in {os.getpid()}") from e

def test_quarantined():
    assert FAULT != "quarantine"

# write(2) of an armed page fails, and touches nothing.
CODE = '''
import ctypes, os, sys
from standin_gpu import USED, _address
address = ctypes.c_void_p(_address(sys.argv[1], USED[3]))
sys.exit(ctypes.CDLL(None).write(os.pipe()[1], address, 16) != 16)
'''

def test_child():
    if ROUND != "verify" or FAULT == "child":
        subprocess.run([sys.executable, "-c", CODE, str(LIB)])
"""


# Collects test_twice twice, but for the fault "once" on the copies.
CONFTEST = """
import os
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if item.name == "test_quarantined":
        report.outcome, report.longrepr = "passed", None
    return report

def pytest_collection_modifyitems(items):
    on_copies = "-verify/" in os.environ.get("NEGATIVA_ROUND", "")
    if not (on_copies and os.environ.get("FAULT") == "once"):
        items += [item for item in items if item.name == "test_twice"]
"""


def with_plugin(folder: Path, suite: str, plugin: str) -> VerifiedProject:
    project = VerifiedProject(folder, suite)
    project.write("conftest.py", CONFTEST)
    project.environ["PYTEST_ADDOPTS"] += f" -p {plugin}"
    return project.trace()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return with_plugin(tmp_path_factory.mktemp("same") / "project", SUITE, "rerunfailures")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_suite_with_reruns_and_subtests_is_proved(traced: VerifiedProject, workers: str) -> None:
    assert "\nPROVED" in traced.verify(workers)
    assert not any(test["changes"] for test in traced.verdict["tests"])


FAULTS = [
    pytest.param(
        "rerun",
        marks=pytest.mark.planted_fault(
            "pytest-rerunfailures repeats a test that fails on the copies, and it passes.",
            says="attempts: call passed -> call passed at attempt 2; call rerun; ",
        ),
    ),
    pytest.param(
        "once",
        marks=pytest.mark.planted_fault(
            "A test that ran twice when traced, under one node id, runs once on the copies.",
            says="attempts: call passed; setup passed; start; teardown passed -> nothing",
        ),
    ),
    pytest.param(
        "subtests",
        marks=pytest.mark.planted_fault(
            "A subtest is skipped on the copies, and its test passes.",
            says="subtests: passed -> skipped",
        ),
    ),
    pytest.param(
        "names",
        marks=pytest.mark.planted_fault(
            "Other subtests than when traced run on the copies.",
            says="subtest-names: [part] (number=0) passed -> [part] (number=2) passed",
        ),
    ),
    pytest.param(
        "skip",
        marks=pytest.mark.planted_fault(
            "A test is skipped on the copies because of a CUDA error.",
            says="error-type: Skipped -> Skipped (no kernel image is available)",
        ),
    ),
    pytest.param(
        "xfail",
        marks=pytest.mark.planted_fault(
            "A test calls pytest.xfail on the copies, and failed by itself when traced.",
            says="error-type: AssertionError -> XFailed",
        ),
    ),
    pytest.param(
        "error",
        marks=pytest.mark.planted_fault(
            "An expected failure hides an error of another type on the copies.",
            says="error-type: AssertionError -> RuntimeError",
        ),
    ),
    pytest.param(
        "text",
        marks=pytest.mark.planted_fault(
            "An expected failure hides that its cause is a CUDA error of the same type.",
            says="error-type: ValueError -> ValueError (CUDA error, invalid device function)",
        ),
    ),
    pytest.param(
        "quarantine",
        marks=pytest.mark.planted_fault(
            "A conftest.py turns a failure on the copies into a test that passed.",
            says="error-type: nothing -> AssertionError",
        ),
    ),
    pytest.param(
        "child",
        marks=pytest.mark.planted_fault(
            "A child writes removed code into a pipe and fails, and the test ignores its status.",
            says="children: nothing -> python",
        ),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("planted", FAULTS)
def test_each_aspect_counts(
    traced: VerifiedProject, planted: str, workers: str, fault: PlantedFault
) -> None:
    shown = traced.verify(workers, status=1, FAULT=planted)
    fault.check(shown)
    assert "1 test ended with the same outcome as in the traced run, but not alike" in shown
    [aspects] = re.findall(r"set verify.tolerate: \[([a-z, -]+)\]", shown)
    shown = traced.verify(workers, f"--negativa-tolerate={aspects}", FAULT=planted)
    assert "Tolerated (verify.tolerate):" in shown and fault.says in shown
    assert "but for tolerated differences" in shown


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A rerun plugin hides that a test first fails on the copies.",
    says="attempts: call passed -> call passed at attempt 2",
)
def test_flaky_reports_the_last_attempt_only(tmp_path: Path, fault: PlantedFault) -> None:
    suite = """
from flaky import flaky
TRIES = []

@flaky(max_runs=3)
def test_use():
    use(LIB)
    TRIES.append(1)
    assert FAULT != "flaky" or len(TRIES) == 2
"""
    project = with_plugin(tmp_path / "project", suite, "flaky")
    assert "\nPROVED" in project.verify()
    fault.check(project.verify(status=1, FAULT="flaky"))
    assert "\nPROVED" in project.verify("--negativa-tolerate=attempts", FAULT="flaky")
