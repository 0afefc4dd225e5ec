"""Rounds of the program: starts after a crash (20 rounds at most), which tests are conclusive.

The program is the user's own command, started as it was typed, in the foreground of the
terminal: ``-s``, ``--pdb`` and Ctrl-C work. If it hangs it is ended, with all that it started.
Its outcomes file tells which test was running.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pytest_negativa.errors import NegativaError, Stopped, refusing
from pytest_negativa.models.environment import ROUND_VARIABLE
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.processes.programs import ChildWatch, end_program
from pytest_negativa.storage.handover import identify_process
from pytest_negativa.storage.outcomes import (
    CommandOutcome,
    by_nodeid,
    read_outcomes,
)
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run

MAX_ROUNDS = 20
"""Most rounds in a row that run the tests that an earlier round left out."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program under proof.

    Attributes:
        command: the command line of rounds that run all tests.
        again: the command line of rounds that run some tests.
        cwd: the folder in which it runs.
        root: the folder against which paths of the project can be understood.
        environ: its environment.
        is_pytest: it traces itself and writes its outcomes; else its exit status is its outcome.
        interactive: a person is debugging it, so there is no time limit.
        folds: its output may go to a file: pytest captures what tests write, so they can't tell.
        alone: ``again`` in one process, for tests that run again on the originals.
    """

    command: tuple[str, ...]
    again: tuple[str, ...]
    cwd: Path
    root: Path
    environ: Mapping[str, str]
    is_pytest: bool
    interactive: bool = False
    folds: bool = False
    alone: tuple[str, ...] = ()

    def new_round(
        self,
        kind: RoundKind,
        run: Run,
        *,
        tests: Sequence[str] | None = None,
        repeated: Mapping[str, bool] | None = None,
        most: int = 1,
        seconds: float | None = None,
        expected: Path | None = None,
    ) -> Round:
        """A round of this program that this process supervises.

        Args:
            run: its folder.
            tests, repeated, most, seconds, expected: see ``Round``.
        """
        return Round(
            kind=kind,
            supervisor=os.getpid(),
            pid_namespace=identify_process().namespace,
            folder=str(run),
            is_pytest=self.is_pytest,
            tests=None if tests is None else tuple(tests),
            repeated=repeated or {},
            most=most,
            seconds=seconds,
            expected=None if expected is None else str(expected),
        )


@dataclass(frozen=True, slots=True)
class RoundResult:
    """End of a round.

    Attributes:
        run: its files.
        session: its tests; a test that was cut short counts as crashed or timed out.
        status: exit status, negative for the signal that ended the program.
        silent: it was ended because no test began or ended for too long.
        seconds: wall time.
        opens: which originals any process opened meanwhile; of rounds on copies only.
    """

    name: str
    kind: RoundKind
    run: Run
    session: SessionResult
    status: int
    silent: bool
    seconds: float
    opens: Opens = field(default_factory=Opens)

    @property
    def died(self) -> bool:
        """Whether it did not end by itself."""
        return self.silent or self.session.exit_status is None

    @property
    def goes_on(self) -> bool:
        """Whether the tests that it left out should run in another process."""
        return self.died or self.session.context_lost


def run_round(
    program: Program,
    round_spec: Round,
    environ: Mapping[str, str],
    silence_limit: float | None,
    *,
    output: Path | None = None,
    follow: Callable[[], object] = lambda: None,
) -> RoundResult:
    """Run ``program`` once.

    Args:
        round_spec: what the round is.
        environ: the program's environment; the round's own variable is added.
        silence_limit: seconds within which a test must begin or end; None: no limit.
        output: a new file for its standard output and error; None: those of this process.
        follow: called when the outcomes file has grown.

    Raises:
        Stopped: a signal asked this process to end; the program has ended.
        NegativaError: the program can't be started, or the folder can't be written.
    """
    run = Run(Path(round_spec.folder))
    write_record(run.round_file, round_spec)
    outcomes = run.outcomes_file
    some = program.alone if round_spec.kind is RoundKind.ORIGINAL else program.again
    command = program.command if round_spec.tests is None else some
    environ = {**environ, ROUND_VARIABLE: str(run.round_file)}
    writer = None if program.is_pytest else CommandOutcome(outcomes, command)
    begin = time.monotonic()
    watch = ChildWatch()
    with watch.handled, _opened(output) as file:
        with refusing(command[0], "started", NegativaError):
            process = subprocess.Popen(
                command, cwd=program.cwd, env=environ, stdout=file, stderr=file
            )
        limit = None if program.interactive else silence_limit
        silent = watch.wait(process, outcomes, limit, follow)
        status = process.returncode
        # A session that came to its end was not interrupted: Ctrl-C went to its debugger.
        interrupted = watch.signal is not None and not (program.is_pytest and status in (0, 1))
        if silent or interrupted or status < 0:
            status = end_program(process, ROUND_VARIABLE, str(run.round_file))
    if interrupted:
        assert watch.signal is not None
        raise Stopped(watch.signal)
    if writer is not None:
        expected = round_spec.expected
        traced = read_outcomes(Path(expected)).exit_status if expected is not None else 0
        writer.finish(status, time.monotonic() - begin, traced=traced, silent=silent)
    return RoundResult(
        name=run.run_id,
        kind=round_spec.kind,
        run=run,
        session=_read(
            outcomes,
            Outcome.TIMED_OUT if silent else Outcome.CRASHED,
            repeats=bool(round_spec.repeated),
        ),
        status=status,
        silent=silent,
        seconds=time.monotonic() - begin,
    )


def _opened(output: Path | None) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    if output is None:
        return contextlib.nullcontext()
    with refusing(output, "created"):
        return output.open("xb")


def _read(path: Path, cut_short: Outcome, *, repeats: bool) -> SessionResult:
    if not path.exists():
        # It ended before its session began: an error of usage, or a crash.
        return SessionResult(
            tests=(), collection_errors=(), command=(), duration=0, longest_silence=0,
            exit_status=None,
        )  # fmt: skip
    return read_outcomes(path, cut_short=cut_short, repeats=repeats)


def run_all(
    start: Callable[[Sequence[str] | None], RoundResult],
    wanted: Sequence[str] | None,
    expected: Collection[str],
) -> Iterator[RoundResult]:
    """Run rounds until every test has an outcome of its own, or a round yields no new outcome.

    A session that dies leaves the rest of its tests out. After a CUDA context is lost, tests fail
    for that reason alone. Such tests run again in a fresh process, in ``MAX_ROUNDS`` at most.

    Args:
        start: runs a round with these tests; with all if None.
        wanted: the tests to run; None: all that the command selects.
        expected: the tests that the command is known to select.
    """
    known: set[str] = set()
    tests = dict.fromkeys(expected if wanted is None else wanted)
    missing = wanted
    for _ in range(MAX_ROUNDS):
        result = start(missing)
        yield result
        tests.update((test.nodeid, None) for test in result.session.tests)
        fresh = conclusive_tests([result]).keys() - known
        known |= fresh
        missing = [nodeid for nodeid in tests if nodeid not in known]
        if not (fresh and missing and result.goes_on):
            return


def conclusive_tests(rounds: Iterable[RoundResult]) -> dict[str, TestResult]:
    """By node id: tests that ran in a process with a sound CUDA context.

    The test that ended its process counts, too.
    """
    return by_nodeid(test for r in rounds for test in r.session.tests if not test.doubtful)
