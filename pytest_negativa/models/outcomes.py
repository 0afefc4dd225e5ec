"""Outcomes and aspects of tests, sessions and circumstances: the lines of ``tests.jsonl``.

The process that reports (not the workers of pytest-xdist) writes one record a line as things
happen. So the test during which a session died is known. Times are nanoseconds
since the epoch, durations seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec

from pytest_negativa.models.base import Line, Record


class Outcome(str, enum.Enum):
    """How a test ended. ``ERROR`` is a failure outside the test itself, in a fixture."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ERROR = "error"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


class Aspect(str, enum.Enum):
    """What two ends of a test with the same outcome may differ in."""

    ATTEMPTS = "attempts"  # how often the test and its phases ran, and how each phase ended
    SUBTESTS = "subtests"  # how many there were, and how they ended
    SUBTEST_NAMES = "subtest-names"  # which of them ended how
    ERROR_TYPE = "error-type"  # class of each exception that ended a phase, and its CUDA errors
    CHILDREN = "children"  # which programs that it started failed, and how


class SessionKind(str, enum.Enum):
    """What ran: which of the two can start it again, and compare."""

    PYTEST = "pytest"  # its tests are the outcomes
    COMMAND = "command"  # any program, whose exit status is the one outcome


class SessionStarted(Line, frozen=True, kw_only=True, tag="session"):
    """The first line. ``command`` are the words that started the session."""

    format: Literal[1] = msgspec.field(default_factory=lambda: 1)  # A factory's is never left out.
    command: tuple[str, ...]
    time_ns: int
    kind: SessionKind = SessionKind.PYTEST


class TestStarted(Line, frozen=True, kw_only=True, tag="start"):
    """A test begins; if nothing more comes of it, the session died in it."""

    __test__ = False

    nodeid: str
    time_ns: int


class PhaseReported(Line, frozen=True, kw_only=True, tag="phase"):
    """A phase of a test is over.

    Attributes:
        when: ``setup``, ``call`` or ``teardown``; ``???`` for a worker that crashed in it.
        outcome: pytest's ``passed``, ``failed`` or ``skipped``; plugins have more, as ``rerun``.
        expected_failure: whether the test is marked as one that fails.
        worker: pytest-xdist's name of the worker.
        text: the error or the reason, shortened.
        gpu_error: the error that the CUDA context is left with, if it is lost for good. Only rounds
            of a verification ask the driver for it: asking waits for the GPU.
        attempt: how often the phase has run by now, in this run of the test; 0: a plugin reports it
            without running it.
        subtest: the name of the subtest that this report is of.
        error_type: the class of the exception that ended the phase, whatever became of the
            outcome, and the CUDA errors that its text names.
        markers: names of the test's markers; of the setup alone.
        keywords: the words that ``-k`` compares; of the setup alone.
        children: programs that failed meanwhile, with their exit status.
    """

    nodeid: str
    when: str
    outcome: str
    duration: float
    time_ns: int
    expected_failure: bool = False
    worker: str | None = None
    text: str | None = None
    gpu_error: str | None = None
    attempt: int = 1
    subtest: str | None = None
    error_type: str | None = None
    markers: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


class CollectionFailed(Line, frozen=True, kw_only=True, tag="collection-error"):
    """A module could not be collected."""

    nodeid: str
    text: str


class Circumstances(Record, frozen=True, kw_only=True):
    """What a session of pytest was started with, as far as its tests may depend on it.

    Attributes:
        program: name of the program that called pytest; ``pytest`` if that is the program.
        options: by name: the value of each option of pytest and of its plugins, as Python's text.
        variables: by name: 16 bits of the digest of each variable's value, which may be a secret.
        files: by path below the root folder: the digest of each file with tests, of the
            ``conftest.py`` around it, of each module of the project that was imported, and of
            pytest's configuration.
    """

    program: str = "pytest"
    options: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


class SessionFinished(Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a session that came to its end.

    ``context_lost`` says that it stopped by itself because the CUDA context was lost.
    """

    exit_status: int
    time_ns: int
    context_lost: bool = False
    circumstances: Circumstances | None = None


class WorkerEnded(Line, frozen=True, kw_only=True, tag="worker-end"):
    """A worker of pytest-xdist on this machine has ended.

    Attributes:
        worker: pytest-xdist's name of it.
        status: exit status of its process, negative for the signal that ended it.
    """

    worker: str
    status: int


AnyOutcomeRecord = (
    SessionStarted | TestStarted | PhaseReported | CollectionFailed | WorkerEnded | SessionFinished
)


class TestResult(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How one test ended.

    Attributes:
        duration: seconds of all its phases.
        text: the error, or why it was skipped, shortened.
        worker: pytest-xdist's name of the worker that ran it.
        gpu_error: see ``PhaseReported``.
        doubtful: the outcome means nothing: an earlier test had lost the process's CUDA context,
            or the session was stopped during the test.
        aspects: what else is known of its end: a sorted list of texts for each aspect. If the test
            ran several times (a node id that is there twice), those of all of them.
        markers, keywords: by which ``-m`` and ``-k`` select it.
    """

    __test__ = False

    nodeid: str
    outcome: Outcome
    duration: float
    text: str | None = None
    worker: str | None = None
    gpu_error: str | None = None
    doubtful: bool = False
    aspects: Mapping[Aspect, tuple[str, ...]] = {}
    markers: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


class SessionResult(Record, frozen=True, kw_only=True):
    """How a session ended.

    Attributes:
        tests: in the order in which they began.
        collection_errors: modules that could not be collected, and why.
        command: the words that started it.
        duration: wall time in seconds, up to the last thing known.
        longest_silence: the longest time in seconds between two lines.
        exit_status: None if the session died: its last line is not there.
        context_lost: it stopped because the CUDA context was lost.
        workers: how the workers of pytest-xdist ended, if that is known.
        running: tests that began and did not end, if the session died.
        repeats: how tests ended that a round on the originals ran again.
        kind: what ran.
        circumstances: what it was started with; None for a command, and if it died.
    """

    tests: tuple[TestResult, ...]
    collection_errors: tuple[str, ...]
    command: tuple[str, ...]
    duration: float
    longest_silence: float
    exit_status: int | None
    context_lost: bool = False
    kind: SessionKind = SessionKind.PYTEST
    workers: tuple[WorkerEnded, ...] = ()
    running: tuple[str, ...] = ()
    circumstances: Circumstances | None = None
    repeats: tuple[TestResult, ...] = ()
