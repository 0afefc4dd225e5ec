"""``tests.jsonl``: how the tests of a session ended, and how two sessions differ."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pytest_negativa.errors import StoreError
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.outcomes import (
    OUTCOMES_VERSION,
    AnyOutcomeRecord,
    Aspect,
    CollectionFailed,
    Outcome,
    OutcomeRecord,
    PhaseReported,
    SessionFinished,
    SessionKind,
    SessionResult,
    SessionStarted,
    TestResult,
    TestStarted,
    WorkerEnded,
)
from pytest_negativa.storage.jsonl import LineWriter
from pytest_negativa.storage.records import read_own

_decode = msgspec.json.Decoder(AnyOutcomeRecord).decode

# What pytest-xdist writes as the phase of a test whose worker crashed.
_CRASHED_PHASE = "???"
_LAST_PHASES = ("teardown", _CRASHED_PHASE)
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
    """How the session that wrote ``path`` ended.

    Args:
        cut_short: the outcome of a test that began and didn't end: the session died in it, or
            was killed because it hung.
        repeats: a test that begins again is no part of its first run.

    Raises:
        StoreError: the file can't be read, or is of another version.
    """
    return fold(_read(path), cut_short, repeats=repeats)


def _read(path: Path) -> list[AnyOutcomeRecord]:
    lines = read_own(path).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(_decode(line))
        except UNDECODABLE as e:
            if number == len(lines):
                break  # Cut off in the middle: the process was killed in its write.
            raise StoreError(f"{path}:{number}: not a record of test outcomes: {e}") from e
    first = next(iter(records), None)
    if isinstance(first, SessionStarted) and first.format_version != OUTCOMES_VERSION:
        raise StoreError(
            f"{path}: format_version {first.format_version}, this release reads "
            f"{OUTCOMES_VERSION}; trace again"
        )
    return records


class EndedTests:
    """Follows an outcomes file that a session writes: which of its tests have ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._nodeids: set[str] = set()

    def read(self) -> set[str]:
        """Read on, and return the node ids of all tests that have ended."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # In the middle of a write.
                self._read += len(line)
                # It only shows progress: a round's end reads the file again.
                with contextlib.suppress(*UNDECODABLE):
                    record = _decode(line)
                    if isinstance(record, PhaseReported) and record.when in _LAST_PHASES:
                        self._nodeids.add(record.nodeid)
        return self._nodeids


def copy_outcomes(source: Path, target: Path, nodeids: Collection[str]) -> None:
    """Copy an outcomes file without the tests that are not among ``nodeids``.

    It names no circumstances: other options select these tests alone.

    Raises:
        StoreError: a file can't be read or written.
    """
    writer = LineWriter(target)
    for record in _read(source):
        if isinstance(record, SessionFinished):
            record = msgspec.structs.replace(record, circumstances=None)
        if not isinstance(record, TestStarted | PhaseReported) or record.nodeid in nodeids:
            writer.write(record)
    writer.close()


def unite_tests(sessions: Iterable[Sequence[TestResult]]) -> tuple[TestResult, ...]:
    """How the tests of several sessions ended, in any order of the sessions."""
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
    records: Iterable[OutcomeRecord], cut_short: Outcome, *, repeats: bool = False
) -> SessionResult:
    """Records of one session to its result; see ``read_outcomes``."""
    session = _Session(repeats=repeats)
    for record in records:
        session.add(record)
    return session.result(cut_short)


@dataclass(slots=True)
class _Test:
    worker: str | None = None
    phases: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    text: str | None = None
    gpu_error: str | None = None
    doubtful: bool = False
    ended: bool = False
    markers: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    aspects: dict[Aspect, list[str]] = field(default_factory=lambda: defaultdict(list))


class _Session:
    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._tests: dict[str, _Test] = {}
        # Earlier runs of tests that began again.
        self._past: list[tuple[str, _Test]] = []
        # By worker: the test that lost its CUDA context.
        self._lost: dict[str | None, str] = {}
        self._collection_errors: list[str] = []
        self._command: tuple[str, ...] = ()
        self._kind = SessionKind.PYTEST
        self._times: list[int] = []
        self._workers: list[WorkerEnded] = []
        self._end: SessionFinished | None = None

    def add(self, record: OutcomeRecord) -> None:
        if isinstance(record, CollectionFailed):
            self._collection_errors.append(f"{record.nodeid}: {record.text}")
        elif isinstance(record, TestStarted):
            self._times.append(record.time_ns)
            test = self._tests.setdefault(record.nodeid, _Test())
            if self._repeats and test.ended:
                self._past.append((record.nodeid, test))
                self._tests[record.nodeid] = test = _Test()
            test.ended = False
            test.aspects[Aspect.ATTEMPTS].append("start")
        elif isinstance(record, PhaseReported):
            self._times.append(record.time_ns)
            self._add_phase(record)
        elif isinstance(record, SessionStarted):
            self._times.append(record.time_ns)
            self._command = record.command
            self._kind = record.kind
        elif isinstance(record, WorkerEnded):
            self._workers.append(record)
        elif isinstance(record, SessionFinished):
            self._times.append(record.time_ns)
            self._end = record

    def _add_phase(self, record: PhaseReported) -> None:
        test = self._tests.setdefault(record.nodeid, _Test())
        test.worker = record.worker
        test.duration += record.duration
        test.markers = record.markers or test.markers
        test.keywords = record.keywords or test.keywords
        test.ended = record.when in _LAST_PHASES
        test.doubtful = self._lost.get(record.worker, record.nodeid) != record.nodeid
        outcome = _outcome(record)
        for aspect, text in _aspects(record, outcome):
            test.aspects[aspect].append(text)
        # A subtest that fails makes its test fail. A skipped one does not make its test skipped.
        if outcome is None or (record.subtest is not None and outcome is not Outcome.FAILED):
            return
        test.phases.append(outcome)
        if outcome is not Outcome.PASSED:
            test.text = test.text or record.text
        if record.gpu_error is not None:
            test.gpu_error = test.gpu_error or record.gpu_error
            self._lost.setdefault(record.worker, record.nodeid)

    def result(self, cut_short: Outcome) -> SessionResult:
        firsts: dict[str, TestResult] = {}
        repeats: list[TestResult] = []
        for nodeid, test in (*self._past, *self._tests.items()):
            phases = test.phases if test.ended else [*test.phases, cut_short]
            found = TestResult(
                nodeid=nodeid,
                outcome=min(phases, key=_GRAVEST.index, default=Outcome.PASSED),
                duration=test.duration,
                text=test.text,
                worker=test.worker,
                gpu_error=test.gpu_error,
                # A session that ended by itself before the test did was stopped: no crash.
                doubtful=test.doubtful or (self._end is not None and not test.ended),
                markers=test.markers,
                keywords=test.keywords,
                aspects={a: tuple(sorted(texts)) for a, texts in test.aspects.items()},
            )
            if firsts.setdefault(nodeid, found) is not found:
                repeats.append(found)
        times = self._times or [0]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return SessionResult(
            tests=tuple(firsts.values()),
            repeats=tuple(repeats),
            collection_errors=tuple(self._collection_errors),
            command=self._command,
            duration=(times[-1] - times[0]) / 1e9,
            longest_silence=max(gaps, default=0) / 1e9,
            exit_status=None if self._end is None else self._end.exit_status,
            context_lost=self._end is not None and self._end.context_lost,
            kind=self._kind,
            workers=tuple(self._workers),
            circumstances=None if self._end is None else self._end.circumstances,
            running=tuple(
                nodeid
                for nodeid, test in self._tests.items()
                if self._end is None and not test.ended
            ),
        )


def _outcome(record: PhaseReported) -> Outcome | None:
    """What one phase says; None for what plugins add, such as an attempt that is repeated."""
    if record.when == _CRASHED_PHASE:
        return Outcome.CRASHED
    if record.outcome == "passed":
        return Outcome.XPASSED if record.expected_failure else Outcome.PASSED
    if record.outcome == "skipped":
        return Outcome.XFAILED if record.expected_failure else Outcome.SKIPPED
    if record.outcome == "failed":
        return Outcome.FAILED if record.when == "call" else Outcome.ERROR
    return None


def _aspects(record: PhaseReported, outcome: Outcome | None) -> Iterator[tuple[Aspect, str]]:
    """What one phase adds to the aspects of its test."""
    if outcome is Outcome.CRASHED:
        return  # Only the controller of pytest-xdist reports the phase of a crash.
    ended = record.outcome if outcome is None else outcome.value
    if record.subtest is None:
        times = f" at attempt {record.attempt}" if record.attempt > 1 else ""
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

    def __init__(self, writer: LineWriter, label: str) -> None:
        self._writer = writer
        self._label = label

    @classmethod
    def start(cls, path: Path, command: Sequence[str]) -> CommandOutcome:
        """Create the file and begin it.

        Raises:
            StoreError: the file can't be created.
        """
        writer, label = LineWriter(path), shlex.join(command)
        writer.write(
            SessionStarted(
                format_version=OUTCOMES_VERSION,
                command=tuple(command),
                time_ns=time.time_ns(),
                kind=SessionKind.COMMAND,
            )
        )
        writer.write(TestStarted(nodeid=label, time_ns=time.time_ns()))
        return cls(writer, label)

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
