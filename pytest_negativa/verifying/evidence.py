"""Evidence in the rounds' files: who loaded copies or originals, GPU tests, untraced children."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.settings import Verify
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Phase, Usage
from pytest_negativa.models.verdict import Need, ProvedLibrary, Verdict
from pytest_negativa.processes.redirect import read_logs
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.verifying.rounds import MAX_ROUNDS, Program, RoundResult, conclusive_tests
from pytest_negativa.verifying.same_outcome import Ends
from pytest_negativa.verifying.traced_run import TracedRun
from pytest_negativa.verifying.tripwire import Touches
from pytest_negativa.verifying.used_originals import loaded_originals

# Phases in which no test runs.
_OUTSIDE_TESTS = (Phase.IMPORT, Phase.COLLECTION, Phase.SESSION)

_UNTRACED = (
    "it loaded the CUDA driver without the CUDA_INJECTION64_PATH of the session, so what it used "
    "was not traced; pass the environment on to child processes"
)


@dataclass(frozen=True, slots=True)
class LoadEvidence:
    """Processes that loaded copies and originals, in all rounds on the copies.

    Attributes:
        copies: by real path of the original: the processes that had its copy mapped.
        originals: by real path of the original: the process that had the original, in words.
        unsubstituted: by real path of the original: why it can't be substituted here.
        incomplete: why processes may have been missed, or None.
        untraced: the process that used a copy and the driver without a trace, in words, or None.
    """

    copies: Mapping[str, Collection[object]] = field(default_factory=dict)
    originals: Mapping[str, str] = field(default_factory=dict)
    unsubstituted: Mapping[str, str] = field(default_factory=dict)
    incomplete: str | None = None
    untraced: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of all tests, mostly on copies: every fact that its verdict follows from.

    Attributes:
        plans: what was tried.
        reconstruction: the copies.
        rounds: the rounds that ran all tests on the copies.
        all_rounds: every start of the program until now.
        usage: what the tests used on the copies.
        compare_launches: both runs counted every launch.
        originals: by node id: how a test ended on the originals after that, each time that it ran.
        loads: which processes loaded what.
        opened, held: by real path of an original: uses of it that speak against it, and others;
            see ``opened_originals`` and ``held_originals``.
        files: see ``judge_files``.
        armed: by real path of the original: removed code that is watched, see ``tripwire``.
        touches: who touched it.
        problems: what else speaks against the attempt, such as a collection error.
        again: removed code that tests used when they ran again on the originals, see
            ``used_again``.
        pages: the CPU code that the traced run, and that the rounds touched; None if the rounds
            did not trace it.
        before: on the originals: the verdict on GPU code, if there is one.
        ended_ns: when, nanoseconds since the epoch.
    """

    traced: TracedRun
    plans: tuple[LibraryPlan, ...]
    program: Program
    settings: Verify
    reconstruction: Reconstruction
    rounds: tuple[RoundResult, ...]
    all_rounds: tuple[RoundResult, ...]
    usage: Usage
    compare_launches: bool
    originals: Ends
    loads: LoadEvidence
    opened: Mapping[str, str]
    held: Mapping[str, str]
    files: tuple[ProvedLibrary, ...]
    problems: tuple[str, ...]
    versions: dict[str, str]
    ended_ns: int
    armed: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    touches: Touches = field(default_factory=Touches)
    again: tuple[Need, ...] = ()
    pages: tuple[HostUsage, HostUsage] | None = None
    before: Verdict | None = None

    @property
    def is_on_copies(self) -> bool:
        """Whether the rounds ran on copies, so that GPU code is tried."""
        return bool(self.reconstruction.root)

    @property
    def planned(self) -> tuple[AnalyzedLibrary, ...]:
        """The libraries with the plans that were tried."""
        tried = {plan.library.path: plan for plan in self.plans}
        known = (one for one in self.traced.planned if one.plan.library.path in tried)
        return tuple(replace(one, plan=tried[one.plan.library.path]) for one in known)

    @property
    def after(self) -> dict[str, TestResult]:
        """By node id: how the tests ended on the copies."""
        return conclusive_tests(self.rounds)


def trace_files(rounds: Sequence[RoundResult]) -> list[Path]:
    """The traces of all processes of the rounds."""
    return [path for r in rounds for path in r.run.trace_files()]


def libraries_by_test(usage: Usage) -> dict[str, set[str]]:
    """By node id: the libraries from which the test was the first to use code."""
    used: dict[str, set[str]] = defaultdict(set)
    for path, context in usage.first_uses():
        if path is not None and context.nodeid is not None:
            used[context.nodeid].add(path)
    return used


def count_gpu_tests(usage: Usage, flaky: Collection[str] = ()) -> int:
    """Number of contexts of tests that were the first to load an image or to look up a kernel.

    Fixtures, and children that no test is known to have started, count too; flaky tests don't.
    """
    if usage.replay is not None:
        return 0
    contexts = {context for _, context in usage.first_uses()}
    tests = {(c.nodeid, c.detail) for c in contexts if c.phase not in _OUTSIDE_TESTS}
    return sum(nodeid not in flaky for nodeid, _ in tests)


def problems_of(rounds: Sequence[RoundResult]) -> Iterator[str]:
    """Reasons against the rounds besides the outcomes of their tests."""
    for result in rounds:
        for error in result.session.collection_errors:
            yield f"not collected: {error}"
        if not result.session.tests and result.died:
            how = f"signal {-result.status}" if result.status < 0 else f"status {result.status}"
            how = "no test began in time" if result.silent else how
            if result.status == 0:
                how = "status 0; tests that a conftest.py runs by pytest.main can't be seen"
            yield f"the session ended before its first test ({how})"
    if len(rounds) == MAX_ROUNDS and rounds[-1].goes_on:
        yield f"{MAX_ROUNDS} sessions in a row died or lost their CUDA context; no more were run"


def gather_loads(
    rounds: Sequence[RoundResult],
    usage: Usage,
    reconstruction: Reconstruction,
    unsubstituted: Mapping[str, str],
    *,
    traces_children: bool = True,
) -> LoadEvidence:
    """Read from logs and traces which processes loaded copies and originals.

    Args:
        usage: what the rounds' own traces add up to.
        reconstruction: the copies.
        unsubstituted: see ``LoadEvidence``.
        traces_children: whether children that are not traced are a lack.
    """
    copies: dict[str, set[object]] = defaultdict(set)
    originals: dict[str, str] = {}
    incomplete: str | None = None
    untraced: str | None = None
    last_traces: dict[tuple[str, int], int] = {}
    for traced in usage.processes:
        key = traced.header.run_id, traced.header.pid
        last_traces[key] = max(last_traces.get(key, 0), traced.header.start_ns)
    links, ours = reconstruction.hard_links, str(injection_library())
    for result in rounds:
        for process in read_logs(result.run.redirect_logs):
            who = f"process {process.pid} ({process.executable})"
            for line in process.lines:
                if line.kind == "copy":
                    # The loader maps a file once, whatever its names.
                    for path in links.get(line.path, (line.path,)):
                        copies[path].add((process.log, line.pid))
            for path, opened in sorted(process.originals):
                originals.setdefault(path, f"{who} opened the original, as {opened}")
            problems = [*process.problems]
            # What a process used that is not traced is not known, neither when it was traced: it
            # may have gone on without the GPU. A trace from before is one of another program with
            # this id, as execve(2) keeps it.
            if process.copies and any(
                line.kind == "driver"
                and line.path != ours
                and last_traces.get((result.name, line.pid), -1) < process.started_ns
                for line in process.lines
            ):
                untraced = untraced or f"{who}: {_UNTRACED}"
                problems += [_UNTRACED] if traces_children else []
            if problems and incomplete is None:
                incomplete = f"{who}: {problems[0]}"
    mapped, unknown = loaded_originals(usage, reconstruction)
    return LoadEvidence(
        copies=copies,
        originals={**mapped, **originals},
        unsubstituted=unsubstituted,
        incomplete=incomplete or unknown,
        untraced=untraced,
    )
