"""Repeated tests of a round: how often they run, in what order, and in how many processes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.session.round_hooks import RoundHooks
from pytest_negativa.storage.outcomes import read_outcomes
from tests.support.verified import VerifiedProject

pytest_plugins = ("pytester",)

HEAD = """
import itertools, pytest

RUNS = itertools.count()
"""
LONG = 3600.0


class Log:
    """Plugin that notes the calls of tests, in their order, and how often fixtures were made."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fixtures: Counter[str] = Counter()

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.calls.append(item.name)

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> None:
        self.fixtures[fixturedef.argname] += 1


def run(
    pytester: pytest.Pytester,
    suite: str,
    *repeated: str,
    most: int,
    seconds: float = LONG,
    passed: bool = True,
    words: tuple[str, ...] = (),
) -> Log:
    """Run a suite with the hooks of a round, in this process."""
    pytester.makepyfile(test_a=HEAD + suite)
    spec = Round(
        kind=RoundKind.ORIGINAL,
        supervisor=os.getppid(),
        pid_namespace=None,
        folder=str(pytester.path),
        is_pytest=True,
        repeated={f"test_a.py::{name}": passed for name in repeated},
        most=most,
        seconds=seconds,
    )
    log = Log()
    pytester.inline_run("-p", "no:randomly", *words, plugins=[RoundHooks(spec), log])
    return log


@pytest.mark.parametrize(
    ("ends", "runs"),
    [
        pytest.param("True", 7, id="passes"),
        pytest.param("False", 7, id="fails"),
        # Perhaps only because another test ran before it, or left something behind.
        pytest.param("run > 0", 7, id="fails-first"),
        pytest.param("run != 2", 3, id="as-traced-and-otherwise"),
        pytest.param("run % 2", 3, id="in-turns"),
    ],
)
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "failed"])
def test_a_test_is_repeated_until_both_ends_are_known(
    pytester: pytest.Pytester, ends: str, runs: int, passed: bool
) -> None:
    wanted = ends if passed else f"not ({ends})"
    suite = f"def test_one():\n    run = next(RUNS)\n    assert {wanted}\n"
    log = run(pytester, suite, "test_one", most=7, passed=passed)
    assert log.calls == ["test_one"] * runs


def test_an_end_in_a_fixture_is_another_end(pytester: pytest.Pytester) -> None:
    suite = """
@pytest.fixture
def broken():
    yield
    assert next(RUNS) % 2

def test_one(broken):
    pass
"""
    assert run(pytester, suite, "test_one", most=7).calls == ["test_one"] * 3


def test_slow_tests_run_a_few_times_however_long_it_takes(pytester: pytest.Pytester) -> None:
    suite = "def test_one(): pass\ndef test_two(): pass\n"
    log = run(pytester, suite, "test_one", "test_two", most=20, seconds=0.0)
    assert log.calls == ["test_one"] * 3 + ["test_two"] * 3


def test_repeated_tests_come_last_with_fixtures_made_anew(pytester: pytest.Pytester) -> None:
    suite = """
@pytest.fixture(scope="session")
def of_session(): pass

@pytest.fixture(scope="module")
def of_module(of_session): pass

@pytest.fixture
def of_test(of_module): pass

def test_one(of_test): pass
def test_two(of_test): pass
def test_three(of_test): pass
"""
    log = run(pytester, suite, "test_one", most=4)
    assert log.calls == ["test_two", "test_three", *["test_one"] * 4]
    # The first run of a repeated test shares what other tests share.
    assert log.fixtures == {"of_session": 4, "of_module": 4, "of_test": 6}


@pytest.mark.parametrize("words", [(), ("-x",)])
def test_a_session_that_stops_repeats_no_test(
    pytester: pytest.Pytester, words: tuple[str, ...]
) -> None:
    suite = """
def test_one(request):
    if not next(RUNS):
        request.session.shouldstop = "enough" if not request.config.option.maxfail else False
        assert False
"""
    assert run(pytester, suite, "test_one", most=5, words=words).calls == ["test_one"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["-n2", "--dist=load --tx=2*popen"])
def test_a_rerun_of_some_tests_has_no_workers(tmp_path: Path, words: str) -> None:
    suite = """
def test_use():
    use(LIB)

@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_flaky(number):
    assert FAULT != "fails"
"""
    project = VerifiedProject(tmp_path / "project", suite).trace()
    project.verify(*words.split(), status=1, FAULT="fails")
    [file] = project.run_folder.glob("verify/*/*-original/tests.jsonl")
    session = read_outcomes(file, repeats=True)
    assert {test.worker for test in (*session.tests, *session.repeats)} == {None}
    assert len(session.tests) == 4 and len(session.repeats) == 4 * 19
