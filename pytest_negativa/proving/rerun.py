"""Runs the program under proof, round by round, and outlives whatever becomes of it.

The program is the user's own command, started as it was typed, in this process's place of
the terminal: ``-s``, ``--pdb`` and Ctrl-C work. It may crash, or hang: then it is ended with
all that it started, and what it had written until then tells which test it was.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.models.outcomes import (
    OUTCOMES_VERSION,
    Outcome,
    PhaseReported,
    SessionFinished,
    SessionResult,
    SessionStarted,
    TestResult,
    TestStarted,
)
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.options import ROUND_VARIABLE
from pytest_negativa.proving.outcomes import (
    is_silent_since,
    outcomes_file,
    read_outcomes,
)
from pytest_negativa.store import write_atomically
from pytest_negativa.tracing.files import LineWriter

_FILE = "round.json"
_POLL = 0.2
# Seconds between asking a process to end and making it.
_GRACE = 5.0


def current_round(environ: Mapping[str, str]) -> Round | None:
    """The round that this process is the program of; None in any other process.

    What a test starts inherits the variable, but has another parent.

    Raises:
        StoreError: the round file can't be read.
    """
    path = environ.get(ROUND_VARIABLE)
    if not path:
        return None
    found = load_round(Path(path))
    return found if found.supervisor == os.getppid() else None


def load_round(path: Path) -> Round:
    """Read a round file.

    Raises:
        StoreError: it can't be read, or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Round)
    except (OSError, msgspec.DecodeError) as e:
        raise StoreError(f"{path}: not a round of this release: {e}") from e


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
        NegativaError: the program can't be started, or the folder can't be written.
    """
    folder = Path(settled.base, settled.run_id)
    round_file = folder / _FILE
    write_atomically(round_file, msgspec.json.encode(settled))
    outcomes = outcomes_file(folder)
    command = program.command if settled.tests is None else program.again
    writer = None if program.is_pytest else CommandOutcome(outcomes, command)
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            command, cwd=program.cwd, env={**environment(folder), ROUND_VARIABLE: str(round_file)}
        )
    except OSError as e:
        raise NegativaError(f"{command[0]}: cannot be started: {e.strerror}") from e
    limit = None if program.interactive else silence_limit
    with _signals_for(process):
        silent = _wait(process, outcomes, limit)
    if silent:
        _end(process, round_file)
    status = process.returncode
    if writer is not None:
        writer.finish(status, time.monotonic() - begin, silent=silent)
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


class CommandOutcome:
    """Writes the outcomes file of a program that doesn't: a single test, the command itself.

    Raises:
        StoreError: the file can't be created.
    """

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self._label = shlex.join(command)
        self._writer = LineWriter(path)
        self._writer.write(
            SessionStarted(
                format_version=OUTCOMES_VERSION, command=tuple(command), time_ns=time.time_ns()
            )
        )
        self._writer.write(TestStarted(nodeid=self._label, time_ns=time.time_ns()))

    def finish(self, status: int, seconds: float, *, silent: bool = False) -> None:
        """Note the end: a negative ``status`` is the signal that killed the program."""
        if not silent and status >= 0:
            text = None if status == 0 else f"exit status {status}"
            for when in ("call", "teardown"):
                failed = status != 0 and when == "call"
                self._writer.write(
                    PhaseReported(
                        nodeid=self._label,
                        when=when,
                        outcome="failed" if failed else "passed",
                        duration=seconds if when == "call" else 0.0,
                        time_ns=time.time_ns(),
                        text=text if failed else None,
                    )
                )
            self._writer.write(SessionFinished(exit_status=status, time_ns=time.time_ns()))
        self._writer.close()


def _wait(process: subprocess.Popen[bytes], outcomes: Path, limit: float | None) -> bool:
    """Wait for the end; True if nothing was heard for ``limit`` seconds before it came."""
    begin = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL)
            return False
        if limit is None or time.monotonic() - begin <= limit:
            continue
        if not outcomes.exists() or is_silent_since(outcomes, limit, time.time()):
            return True


@contextlib.contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the program by itself; what is sent to this process alone is passed on."""

    def leave(_number: int, _frame: object) -> None:
        pass

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    wanted = {signal.SIGINT: leave, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    try:
        before = {number: signal.signal(number, do) for number, do in wanted.items()}
    except ValueError:  # Not in the main thread: the program's owner sees to signals.
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], round_file: Path) -> None:
    """End the program and all that it started and that still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _marked(round_file):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    process.kill()
    process.wait()


def _marked(round_file: Path) -> Iterator[int]:
    """Processes whose environment names the round."""
    mark = os.fsencode(f"{ROUND_VARIABLE}={round_file}")
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def run_all(
    start: Callable[[Sequence[str] | None], RoundResult],
    wanted: Sequence[str] | None,
    expected: Collection[str],
) -> Iterator[RoundResult]:
    """Rounds until every test has an outcome of its own, or nothing more is to be had.

    A session that dies takes the rest of its tests with it, and after a CUDA context is lost
    tests fail for that reason alone: such tests run again, in a fresh process.

    Args:
        start: runs a round with these tests, or all.
        wanted: the tests that are to run; None: all that the command selects.
        expected: the tests that are known to be among them.
    """
    result = start(wanted)
    yield result
    known = {test.nodeid for test in settled_tests(result)}
    tests = dict.fromkeys(expected if wanted is None else wanted)
    tests.update((test.nodeid, None) for test in result.session.tests)
    while result.goes_on and (missing := [nodeid for nodeid in tests if nodeid not in known]):
        result = start(missing)
        yield result
        fresh = {test.nodeid for test in settled_tests(result)}
        if not fresh - known:
            return
        known |= fresh


def settled_tests(result: RoundResult) -> Iterator[TestResult]:
    """The tests of a round that came to an end in a sound process, or ended it."""
    return (test for test in result.session.tests if not test.doubtful)
