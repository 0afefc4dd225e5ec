"""Runs the program under proof, round by round, and outlives whatever becomes of it.

The program is the user's own command, started as it was typed, in this process's place of
the terminal: ``-s``, ``--pdb`` and Ctrl-C work. It may crash, or hang: then it is ended with
all that it started, and what it had written until then tells which test it was.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.environment import ROUND_VARIABLE
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.processes.watch import ChildWatch, Interrupted, end_program
from pytest_negativa.storage.outcomes import CommandOutcome, outcomes_file, read_outcomes
from pytest_negativa.storage.rounds import save_round

MAX_ROUNDS = 20
"""How often the tests that a session left out are started again, in one go."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is run.

    Attributes:
        command: the words of the first round.
        again: the words of later rounds, of which the user sees and keeps less.
        cwd: where.
        is_pytest: it writes its outcomes itself; else its exit status is its one outcome.
        interactive: a person is debugging it: there is no time limit.
    """

    command: tuple[str, ...]
    again: tuple[str, ...]
    cwd: Path
    is_pytest: bool
    interactive: bool = False


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round.

    Attributes:
        folder: its files.
        session: its tests; those that were cut short count as crashed or timed out.
        status: exit status, negative for the signal that ended it.
        silent: it was ended because nothing was heard of it for too long.
        seconds: wall time.
    """

    name: str
    kind: RoundKind
    folder: Path
    session: SessionResult
    status: int
    silent: bool
    seconds: float

    @property
    def died(self) -> bool:
        """Whether it didn't come to its end by itself."""
        return self.silent or not self.session.complete

    @property
    def goes_on(self) -> bool:
        """Whether tests that it left out should run in another process."""
        return self.died or self.session.context_lost


Environment = Callable[[Path], Mapping[str, str]]
"""A round's folder to the environment that its program gets."""


def run_round(
    program: Program, settled: Round, environment: Environment, silence_limit: float | None
) -> RoundResult:
    """Run ``program`` once.

    Args:
        settled: what the round is; its folder must not exist yet.
        environment: what the program's environment is to be, but for the round's own variable.
        silence_limit: seconds that it may go without starting or ending a test; None: any.

    Raises:
        Interrupted: this process was asked to end; the program has ended.
        NegativaError: the program can't be started, or the folder can't be written.
    """
    round_file = save_round(settled)
    folder = round_file.parent
    outcomes = outcomes_file(folder)
    command = program.command if settled.tests is None else program.again
    environ = {**environment(folder), ROUND_VARIABLE: str(round_file)}
    writer = None if program.is_pytest else CommandOutcome(outcomes, command)
    begin = time.monotonic()
    with ChildWatch() as watch:
        try:
            process = subprocess.Popen(command, cwd=program.cwd, env=environ)
        except OSError as e:
            raise NegativaError(f"{command[0]}: cannot be started: {e.strerror}") from e
        limit = None if program.interactive else silence_limit
        silent = watch.wait(process, outcomes, limit)
        status = process.returncode
        # A session that came to its end was not interrupted: Ctrl-C went to its debugger.
        interrupted = watch.signal is not None and not (program.is_pytest and status in (0, 1))
        if silent or interrupted or status < 0:
            status = end_program(process, ROUND_VARIABLE, str(round_file))
    if interrupted:
        assert watch.signal is not None
        raise Interrupted(watch.signal)
    if writer is not None:
        expected = settled.expected
        traced = read_outcomes(Path(expected)).exit_status if expected is not None else 0
        writer.finish(status, time.monotonic() - begin, traced=traced, silent=silent)
    return RoundResult(
        name=settled.run_id,
        kind=settled.kind,
        folder=folder,
        session=_read(outcomes, Outcome.TIMED_OUT if silent else Outcome.CRASHED),
        status=status,
        silent=silent,
        seconds=time.monotonic() - begin,
    )


def _read(path: Path, cut_short: Outcome) -> SessionResult:
    if not path.exists():
        # It ended before it was a session: an error of usage, or a crash at its start.
        return SessionResult(
            tests=(), collection_errors=(), command=(), duration=0, longest_silence=0,
            exit_status=None,
        )  # fmt: skip
    return read_outcomes(path, cut_short=cut_short)


def run_all(
    start: Callable[[Sequence[str] | None], RoundResult],
    wanted: Sequence[str] | None,
    expected: Collection[str],
) -> Iterator[RoundResult]:
    """Rounds until every test has an outcome of its own, or nothing more is to be had.

    A session that dies takes the rest of its tests with it, and after a CUDA context is lost
    tests fail for that reason alone: such tests run again, in a fresh process. But not for
    ever: where each of a thousand tests dies, ``MAX_ROUNDS`` of them tell enough.

    Args:
        start: runs a round with these tests, or all.
        wanted: the tests that are to run; None: all that the command selects.
        expected: the tests that are known to be among them.
    """
    known: set[str] = set()
    tests = dict.fromkeys(expected if wanted is None else wanted)
    missing = wanted
    for _ in range(MAX_ROUNDS):
        result = start(missing)
        yield result
        tests.update((test.nodeid, None) for test in result.session.tests)
        fresh = {test.nodeid for test in settled_tests(result)} - known
        known |= fresh
        missing = [nodeid for nodeid in tests if nodeid not in known]
        if not (fresh and missing and result.goes_on):
            return


def settled_tests(result: RoundResult) -> Iterator[TestResult]:
    """The tests of a round that came to an end in a sound process, or ended it."""
    return (test for test in result.session.tests if not test.doubtful)
