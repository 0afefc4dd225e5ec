"""Programs that run in rounds: what is known of them however they end, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.models.environment import ROUND_VARIABLE
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.round import RoundKind
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.rounds import current_round
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.rounds import (
    MAX_ROUNDS,
    RoundResult,
    run_all,
    run_round,
)
from tests.support.libraries import ROOT
from tests.support.rounds import program_of, round_spec, run_command


@pytest.mark.parametrize(
    ("script", "status", "outcome"),
    [
        ("exit 0", 0, Outcome.PASSED),
        ("exit 3", 3, Outcome.FAILED),
        ("kill -SEGV $$", -signal.SIGSEGV, Outcome.CRASHED),
    ],
)
def test_how_a_command_ends(tmp_path: Path, script: str, status: int, outcome: Outcome) -> None:
    result = run_command(tmp_path, "sh", "-c", script)
    [test] = result.session.tests
    assert (result.status, test.outcome) == (status, outcome)
    assert test.nodeid == f"sh -c '{script}'"
    assert not result.silent and result.died == (outcome is Outcome.CRASHED)


def test_a_silent_command_is_ended_with_its_children(tmp_path: Path) -> None:
    result = run_command(tmp_path, "sh", "-c", "sleep 95.25 & wait", limit=0.5)
    assert result.silent and result.session.tests[0].outcome is Outcome.TIMED_OUT
    assert not is_running("95.25")


def test_a_crash_leaves_no_children(tmp_path: Path) -> None:
    """They would hold the GPU's memory while the remaining tests run."""
    result = run_command(tmp_path, "sh", "-c", "sleep 95.75 & kill -9 $$")
    assert result.status == -signal.SIGKILL
    assert not is_running("95.75")


def is_running(seconds: str) -> bool:
    """Whether a process sleeps for so long."""
    return any(p.info["cmdline"] == ["sleep", seconds] for p in psutil.process_iter(["cmdline"]))


def test_the_handlers_of_signals_are_put_back(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run_command(tmp_path, "true")
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(NegativaError, match="/no/such: cannot be started: No such file"):
        run_command(tmp_path, "/no/such")


@pytest.mark.parametrize("is_pytest", [True, False])
def test_only_the_program_itself_is_of_the_round(tmp_path: Path, is_pytest: bool) -> None:
    """What it starts inherits the variable; and a program that is no session is not asked."""
    code = (
        "import os, sys, subprocess\n"
        "from pytest_negativa.storage.rounds import current_round\n"
        "print(current_round(os.environ) is not None, flush=True)\n"
        "sys.argv[1:] and subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
    )
    script = f'{sys.executable} -c "$CODE" "$CODE" > seen'
    program = program_of(tmp_path, "sh", "-c", f"exec {script}")
    environ = {**os.environ, "CODE": code}
    run_round(program, round_spec(tmp_path, is_pytest=is_pytest), environ, None)
    assert (tmp_path / "seen").read_text().split() == [str(is_pytest), "False"]
    assert current_round({}) is None
    with pytest.raises(StoreError, match="not a round of this release"):
        current_round({ROUND_VARIABLE: str(tmp_path / "seen")})


@pytest.mark.parametrize("is_same", [True, False])
def test_a_parent_of_the_same_id_in_another_pid_namespace(tmp_path: Path, is_same: bool) -> None:
    spec = structs.replace(round_spec(tmp_path, is_pytest=True), supervisor=os.getppid())
    if not is_same:
        spec = structs.replace(spec, pid_namespace="pid:[1]")
    (tmp_path / "001").mkdir()
    write_record(Run(tmp_path / "001").round_file, spec)
    found = current_round({ROUND_VARIABLE: str(Run(tmp_path / "001").round_file)})
    assert found == (spec if is_same else None)


@pytest.mark.slow
def test_an_interrupted_program_is_over(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pytest_negativa.errors import Stopped\n"
        "from tests.support.rounds import run_command\n"
        "try:\n"
        "    run_command(Path(sys.argv[1]), 'sh', '-c', 'trap \"\" TERM; echo > ready; sleep 94')\n"
        "except Stopped as e:\n"
        "    print(e)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=60)
    assert shown == "interrupted (SIGTERM): nothing is proved\n"


# ---- Rounds until all tests are known ----


class Sessions:
    """Sessions of tests of which some end the process, or lose its context."""

    def __init__(self, tests: Sequence[str], deadly: Sequence[str], *, lose: bool = False) -> None:
        self.tests = tests
        self.deadly = deadly
        self.lose = lose
        self.asked: list[tuple[str, ...] | None] = []

    def start(self, wanted: Sequence[str] | None) -> RoundResult:
        self.asked.append(None if wanted is None else tuple(wanted))
        done: list[TestResult] = []
        died = lost = False
        for test in self.tests:
            if wanted is not None and test not in wanted:
                continue
            outcome = Outcome.CRASHED if test in self.deadly else Outcome.PASSED
            done.append(TestResult(nodeid=test, outcome=outcome, duration=0, doubtful=lost))
            if test in self.deadly:
                died, lost = not self.lose, self.lose
            if died:
                break
        session = SessionResult(
            tests=tuple(done),
            collection_errors=(),
            command=(),
            duration=0,
            longest_silence=0,
            exit_status=None if died else 0,
            context_lost=lost,
        )
        return RoundResult("", RoundKind.VERIFY, Run(Path()), session, 0, silent=False, seconds=0)

    def run(self, wanted: Sequence[str] | None = None) -> list[RoundResult]:
        return list(run_all(self.start, wanted, self.tests))


def test_a_session_that_ends_well_is_the_only_one() -> None:
    sessions = Sessions("abc", "")
    sessions.run()
    assert sessions.asked == [None]


@pytest.mark.parametrize("lose", [False, True])
def test_what_is_left_runs_again(lose: bool) -> None:
    sessions = Sessions("abcdef", "be", lose=lose)
    results = sessions.run()
    assert sessions.asked == [None, tuple("cdef"), ("f",)]
    assert not results[-1].goes_on


def test_only_what_is_wanted_runs_again() -> None:
    sessions = Sessions("abcdef", "b")
    sessions.run("abd")
    assert sessions.asked == [tuple("abd"), ("d",)]


def test_what_dies_before_its_first_test_is_not_started_again() -> None:
    sessions = Sessions("abc", "")
    nothing = replace(
        sessions.start(None),
        session=SessionResult(
            tests=(), collection_errors=(), command=(), duration=0, longest_silence=0,
            exit_status=None,
        ),
    )  # fmt: skip
    assert len(list(run_all(lambda _: nothing, None, "abc"))) == 1


def test_not_for_ever() -> None:
    tests = [str(number) for number in range(100)]
    results = Sessions(tests, tests).run()
    assert len(results) == MAX_ROUNDS and results[-1].goes_on
