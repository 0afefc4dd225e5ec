"""``tests.jsonl``: the outcome of a test from its phases, the gravest of several runs, crashes."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.outcomes import (
    AnyOutcomeRecord,
    Aspect,
    CollectionFailed,
    Outcome,
    PhaseReported,
    SessionFinished,
    SessionKind,
    SessionResult,
    SessionStarted,
    TestResult,
    TestStarted,
    WorkerEnded,
)
from pytest_negativa.storage.jsonl import LineWriter, is_torn

_decode = msgspec.json.Decoder(AnyOutcomeRecord).decode

# What pytest-xdist writes as the phase of a test whose worker crashed.
_CRASHED_PHASE = "???"
_LAST_PHASES = ("teardown", _CRASHED_PHASE)
# As ``jsonl.LineWriter`` writes the last phase; within texts the quotes are escaped.
_ENDED = b'"when":"teardown"'
# By pytest's outcome, and whether the test is marked as one that fails.
_GOOD_ENDS = {
    ("passed", False): Outcome.PASSED,
    ("passed", True): Outcome.XPASSED,
    ("skipped", False): Outcome.SKIPPED,
    ("skipped", True): Outcome.XFAILED,
}
# If phases of a test disagree, the earlier of these outcomes counts.
_GRAVEST = (
    Outcome.CRASHED,
    Outcome.TIMED_OUT,
    Outcome.FAILED,
    Outcome.ERROR,
    Outcome.XPASSED,
    Outcome.XFAILED,
    Outcome.SKIPPED,
    Outcome.PASSED,
)


def read_outcomes(
    path: Path, *, cut_short: Outcome = Outcome.CRASHED, repeats: bool = False
) -> SessionResult:
    """Result of the session that wrote ``path``.

    Args:
        cut_short: the outcome of a test that began and didn't end: the session died in it, or
            was killed because it hung.
        repeats: a test that begins again is no part of its first run.

    Raises:
        StoreError: the file can't be read, or is of another format.
    """
    return fold(_read(path), cut_short, repeats=repeats)


def _read(path: Path) -> list[AnyOutcomeRecord]:
    records = []
    with refusing(path, "read"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if is_torn(line):
                continue
            try:
                records.append(_decode(line))
            except UNDECODABLE as e:
                raise StoreError(
                    f"{path}:{number}: not a record of test outcomes of this release: {e}; "
                    "trace again"
                ) from e
    return records


def count_ended(path: Path) -> int:
    """Number of tests that have ended, of a session at work. It only shows progress."""
    with contextlib.suppress(OSError):
        return path.read_bytes().count(_ENDED)
    return 0


def unite_tests(sessions: Iterable[Sequence[TestResult]]) -> tuple[TestResult, ...]:
    """Results of the tests of several sessions, in any order of the sessions."""
    found: defaultdict[str, list[TestResult]] = defaultdict(list)
    for test in itertools.chain.from_iterable(sessions):
        found[test.nodeid].append(test)
    return tuple(_gravest(found[nodeid]) for nodeid in sorted(found))


def _gravest(ends: Sequence[TestResult]) -> TestResult:
    bare = [msgspec.structs.replace(end, markers=(), keywords=()) for end in ends]
    return msgspec.structs.replace(
        min(
            bare,
            key=lambda end: (
                _GRAVEST.index(end.outcome),
                -end.duration,
                msgspec.json.encode(end, order="deterministic"),
            ),
        ),
        markers=tuple(sorted({name for end in ends for name in end.markers})),
        keywords=tuple(sorted({name for end in ends for name in end.keywords})),
    )


def fold(
    records: Iterable[AnyOutcomeRecord], cut_short: Outcome, *, repeats: bool = False
) -> SessionResult:
    """Records of one session to its result; see ``read_outcomes``."""
    lines = tuple(records)
    start = next((line for line in lines if isinstance(line, SessionStarted)), None)
    end = next((line for line in reversed(lines) if isinstance(line, SessionFinished)), None)
    runs = _runs_of_tests(lines, repeats=repeats)
    results = [_result_of(run, cut_short, stopped=end is not None) for run in runs]
    firsts: dict[str, TestResult] = {}
    others = [one for one in results if firsts.setdefault(one.nodeid, one) is not one]
    untimed = CollectionFailed | WorkerEnded
    times = [line.time_ns for line in lines if not isinstance(line, untimed)] or [0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return SessionResult(
        tests=tuple(firsts.values()),
        repeats=tuple(others),
        collection_errors=tuple(
            f"{line.nodeid}: {line.text}" for line in lines if isinstance(line, CollectionFailed)
        ),
        command=() if start is None else start.command,
        duration=(times[-1] - times[0]) / 1e9,
        longest_silence=max(gaps, default=0) / 1e9,
        exit_status=None if end is None else end.exit_status,
        context_lost=end is not None and end.context_lost,
        kind=SessionKind.PYTEST if start is None else start.kind,
        workers=tuple(line for line in lines if isinstance(line, WorkerEnded)),
        circumstances=None if end is None else end.circumstances,
        running=tuple(run.nodeid for run in runs if end is None and not run.ended),
    )


@dataclass(slots=True)
class _Run:
    """A run of a test, as far as lines tell of it."""

    nodeid: str
    starts: int = 0
    phases: list[PhaseReported] = field(default_factory=list)
    ended: bool = False
    doubtful: bool = False


def _runs_of_tests(lines: Sequence[AnyOutcomeRecord], *, repeats: bool) -> list[_Run]:
    runs: list[_Run] = []
    last: dict[str, _Run] = {}
    # By worker: the test that lost its CUDA context.
    lost: dict[str | None, str] = {}
    for line in lines:
        if not isinstance(line, TestStarted | PhaseReported):
            continue
        run, is_start = last.get(line.nodeid), isinstance(line, TestStarted)
        if run is None or (repeats and is_start and run.ended):
            run = last[line.nodeid] = _Run(line.nodeid)
            runs.append(run)
        if isinstance(line, TestStarted):
            run.starts += 1
            run.ended = False
            continue
        run.phases.append(line)
        run.ended = line.when in _LAST_PHASES
        run.doubtful = lost.get(line.worker, line.nodeid) != line.nodeid
        if line.gpu_error is not None and _counted(line) is not None:
            lost.setdefault(line.worker, line.nodeid)
    return runs


def _result_of(run: _Run, cut_short: Outcome, *, stopped: bool) -> TestResult:
    """The result of a run of a test; ``stopped``: the session came to an end by itself."""
    counted = [(p, outcome) for p in run.phases if (outcome := _counted(p)) is not None]
    outcomes = [outcome for _, outcome in counted] + ([] if run.ended else [cut_short])
    aspects: defaultdict[Aspect, list[str]] = defaultdict(list)
    if run.starts:
        aspects[Aspect.ATTEMPTS] += ["start"] * run.starts
    for phase in run.phases:
        for aspect, text in _aspects(phase, _outcome(phase)):
            aspects[aspect].append(text)
    return TestResult(
        nodeid=run.nodeid,
        outcome=min(outcomes, key=_GRAVEST.index, default=Outcome.PASSED),
        duration=sum((phase.duration for phase in run.phases), 0.0),
        text=next((p.text for p, found in counted if found is not Outcome.PASSED and p.text), None),
        worker=run.phases[-1].worker if run.phases else None,
        gpu_error=next((p.gpu_error for p, _ in counted if p.gpu_error), None),
        # A session that ended by itself before the test did was stopped: no crash.
        doubtful=run.doubtful or (stopped and not run.ended),
        markers=next((p.markers for p in reversed(run.phases) if p.markers), ()),
        keywords=next((p.keywords for p in reversed(run.phases) if p.keywords), ()),
        aspects={aspect: tuple(sorted(texts)) for aspect, texts in aspects.items()},
    )


def _counted(record: PhaseReported) -> Outcome | None:
    """Outcome of a test by one of its phases.

    A subtest that fails makes its test fail. A skipped one does not make its test skipped.
    """
    outcome = _outcome(record)
    return outcome if record.subtest is None or outcome is Outcome.FAILED else None


def _outcome(record: PhaseReported) -> Outcome | None:
    """Outcome of one phase; None for what plugins add, such as an attempt that is repeated."""
    if record.when == _CRASHED_PHASE:
        return Outcome.CRASHED
    if record.outcome == "failed":
        return Outcome.FAILED if record.when == "call" else Outcome.ERROR
    return _GOOD_ENDS.get((record.outcome, record.expected_failure))


def _aspects(record: PhaseReported, outcome: Outcome | None) -> Iterator[tuple[Aspect, str]]:
    """Texts that one phase adds to the aspects of its test."""
    if outcome is Outcome.CRASHED:
        return  # Only the controller of pytest-xdist reports the phase of a crash.
    ended = record.outcome if outcome is None else outcome.value
    if record.subtest is None:
        times = f" at attempt {record.attempt}" if record.attempt != 1 else ""
        yield Aspect.ATTEMPTS, f"{record.when} {ended}{times}"
    else:
        yield Aspect.SUBTESTS, ended
        yield Aspect.SUBTEST_NAMES, f"{record.subtest} {ended}"
    yield from ((Aspect.CHILDREN, text) for text in record.children)
    # An attempt that is repeated is no end of the test.
    if record.error_type is not None and outcome is not None:
        yield Aspect.ERROR_TYPE, record.error_type


def by_nodeid(results: Iterable[TestResult]) -> dict[str, TestResult]:
    """Results by node id; of several with one id the last."""
    return {result.nodeid: result for result in results}


class CommandOutcome:
    """Writes the outcomes file of a program that writes none: the command is its one test."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        """Create the file and begin it.

        Raises:
            StoreError: the file can't be created.
        """
        self._writer, self._label = LineWriter(path), shlex.join(command)
        self._writer.write(
            SessionStarted(
                command=tuple(command),
                time_ns=time.time_ns(),
                kind=SessionKind.COMMAND,
            )
        )
        self._writer.write(TestStarted(nodeid=self._label, time_ns=time.time_ns()))

    def finish(
        self, status: int, seconds: float, *, traced: int | None = None, silent: bool = False
    ) -> None:
        """Note the end: a negative ``status`` is the signal that killed the program.

        Args:
            traced: the status of the traced run, which is the expected one; None if this is the
                traced run.
        """
        if not silent and status >= 0:
            wrong = traced is not None and status != traced
            text = f"exit status {status}, {traced} when traced" if wrong else None
            for when in ("call", "teardown"):
                failed = wrong and when == "call"
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
