"""Verification: the plan of a traced run, put to the test. Composes the stages, as pipeline does.

A supervisor, which loads neither the project's code nor CUDA, writes the copies, starts the
program on them, outlives its crashes and judges. See ``supervise`` for how pytest becomes one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

from pytest_negativa.errors import StoreError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.models.settings import CopyKind, Granularity, Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.models.verdict import (
    VERDICT_VERSION,
    RoundFacts,
    Verdict,
    Versions,
)
from pytest_negativa.processes.redirect import (
    make_logs_folder,
    make_table,
    redirect_environment,
    why_not_replaceable,
    why_unsupported,
    write_table,
)
from pytest_negativa.reporting.units import format_bytes, format_items
from pytest_negativa.rewriting.compact.records import CompactOptions
from pytest_negativa.rewriting.copies_lock import check_copies, hold_copies
from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.storage.outcomes import (
    by_nodeid,
    iter_differences,
    outcomes_file,
    read_outcomes,
)
from pytest_negativa.storage.runs import (
    RECONSTRUCTED,
    failure_of,
    load_planned,
    require_run,
    why_unplanned,
    write_record,
)
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.start import new_run_id
from pytest_negativa.verifying.evidence import (
    REDIRECT_LOGS,
    count_gpu_tests,
    first_uses,
    gather,
    problems_of,
    trace_files,
)
from pytest_negativa.verifying.judge import (
    TestEvidence,
    judge_libraries,
    judge_tests,
    reasons_of_libraries,
    reasons_of_tests,
)
from pytest_negativa.verifying.rounds import (
    Program,
    RoundResult,
    run_all,
    run_round,
    settled_tests,
)

_VERIFY = "verify"
_LEAST_SILENCE = 60.0
_TIMES_SILENCE = 5.0

Prepare = Callable[[Mapping[str, str], Path], Mapping[str, str]]
"""Environment and round folder to the environment of a program that doesn't trace itself."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A traced run with all that verifying it takes.

    Attributes:
        folder: its folder.
        planned: maps and plans of its libraries.
        usage: what it used.
        session: how its tests ended.
    """

    folder: Path
    planned: tuple[AnalyzedLibrary, ...]
    usage: Usage
    session: SessionResult

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def plans(self) -> tuple[LibraryPlan, ...]:
        return tuple(p.plan for p in self.planned)

    @property
    def loaded(self) -> frozenset[str]:
        """Real paths of the libraries that any of its processes had mapped."""
        return frozenset(u.library.path for u in self.usage.libraries if u.processes)


def load_traced_run(folder: Path, settings: Settings) -> TracedRun:
    """Read what a traced run has left.

    Raises:
        NegativaError: it can't be verified, and why.
    """
    folder = require_run(folder)
    refuse_failed(folder, settings)
    try:
        usage = msgspec.json.decode((folder / "usage.json").read_bytes(), type=Usage)
    except (OSError, msgspec.DecodeError) as e:
        raise StoreError(f"{folder}: not a traced run of this release: {e}") from e
    if usage.replay is not None:
        raise StoreError(
            f"{folder}: replays a trace of another machine, and nothing is proved by that; trace "
            "on a machine with a GPU"
        )
    outcomes = outcomes_file(folder)
    if not outcomes.exists():
        raise StoreError(f"{outcomes}: not there, so outcomes can't be compared; trace again")
    planned = load_planned(folder)
    if settings.granularity is Granularity.KERNEL and any(
        p.plan.granularity != Granularity.KERNEL.value for p in planned
    ):
        raise StoreError(
            f"{folder}: planned at element granularity; trace with --negativa-granularity=kernel, "
            "or plan this run again (negativa locate --granularity kernel)"
        )
    return TracedRun(
        folder=folder,
        planned=planned,
        usage=usage,
        session=read_outcomes(outcomes),
    )


def refuse_failed(folder: Path, settings: Settings) -> None:
    """Let no run that failed pass, unless the settings accept that.

    Raises:
        StoreError: it failed; why, and what to do.
    """
    failure = failure_of(folder)
    if failure is None or settings.trace.accept_failed:
        return
    if not (folder / "plan").is_dir():
        raise StoreError(why_unplanned(folder))
    raise StoreError(
        f"{folder}: this run failed ({failure}), and was planned all the same; verify it with "
        "--accept-failed (with pytest: --negativa-accept-failed)"
    )


@dataclass(slots=True)
class Rounds:
    """Starts the rounds of one verification, each in a folder of its own."""

    traced: TracedRun
    program: Program
    settings: Settings
    root: Path
    environ: Mapping[str, str]
    prepare: Prepare
    folder: Path
    copies: Path
    done: list[RoundResult] = field(default_factory=list)

    def run(
        self,
        kind: RoundKind,
        tests: Sequence[str] | None,
        table: Path | None,
    ) -> tuple[RoundResult, ...]:
        """Rounds of a kind until all tests have an outcome; see ``run_all``.

        Args:
            table: what to redirect; None: nothing.
        """
        expected = [test.nodeid for test in self.traced.session.tests]
        return tuple(run_all(lambda t: self.run_once(kind, t, table), tests, expected))

    def run_once(
        self, kind: RoundKind, tests: Sequence[str] | None, table: Path | None
    ) -> RoundResult:
        """A single round; see ``run``."""
        settled = Round(
            kind=kind,
            supervisor=os.getpid(),
            base=str(self.folder),
            run_id=f"{len(self.done) + 1:03}-{kind.value}",
            root=str(self.root),
            is_pytest=self.program.is_pytest,
            tests=None if tests is None else tuple(tests),
            expected=str(outcomes_file(self.traced.folder)),
            stop_at_failure=kind is RoundKind.PROBE,
        )
        # Nobody is to write other copies while the tests run on these.
        held = contextlib.nullcontext() if table is None else hold_copies(self.copies)
        with held:
            result = run_round(
                self.program,
                settled,
                lambda folder: self._environment(folder, table),
                self._silence_limit(),
            )
        self.done.append(result)
        return result

    def _environment(self, folder: Path, table: Path | None) -> Mapping[str, str]:
        environ = dict(self.environ)
        if table is not None:
            logs = folder / REDIRECT_LOGS
            make_logs_folder(logs, Path(self.settings.directory))
            environ.update(redirect_environment(environ, table, logs))
        return self.prepare(environ, folder)

    def _silence_limit(self) -> float | None:
        given = self.settings.verify.timeout
        if given is not None:
            return float(given) or None
        return max(_LEAST_SILENCE, _TIMES_SILENCE * self.traced.session.longest_silence)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The tests once on all copies."""

    reconstruction: Reconstruction
    table: Path | None
    rounds: tuple[RoundResult, ...]

    @property
    def tests(self) -> dict[str, TestResult]:
        return by_nodeid(test for r in self.rounds for test in settled_tests(r))


Say = Callable[[str], None]


class Verification:
    """One verification of a traced run.

    Args:
        root: the folder against which paths of the project can be understood.
        environ: the program's environment, without any of ours.
        prepare: adds what a program needs that doesn't trace itself.
        say: shows a line of progress.
    """

    def __init__(
        self,
        traced: TracedRun,
        program: Program,
        settings: Settings,
        *,
        root: Path,
        environ: Mapping[str, str],
        prepare: Prepare,
        say: Say,
    ) -> None:
        self.traced = traced
        self.folder = traced.folder / _VERIFY / new_run_id()
        self.settings = settings
        self.say = say
        self._record = traced.folder / "verdict.json"
        # One of before must not outlive a verification that is interrupted.
        self._record.unlink(missing_ok=True)
        self._copies = Path(settings.directory) / RECONSTRUCTED
        self._unsubstituted = _why_not_substituted(traced.plans, self._copies)
        self.rounds = Rounds(
            traced=traced,
            program=program,
            settings=settings,
            root=root,
            environ=environ,
            prepare=prepare,
            folder=self.folder,
            copies=self._copies,
        )

    def attempt(self, planned: Sequence[AnalyzedLibrary]) -> Attempt:
        """Write the copies and run all tests on them."""
        reconstruction, table = self.write_copies(planned)
        self.say(_written_line(reconstruction, planned))
        rounds = self.rounds.run(RoundKind.VERIFY, None, table)
        return Attempt(reconstruction=reconstruction, table=table, rounds=rounds)

    def write_copies(
        self, planned: Sequence[AnalyzedLibrary], *, copy_all: bool = False
    ) -> tuple[Reconstruction, Path | None]:
        """Make the copies, and the table that redirects to them; None where there are none.

        Args:
            copy_all: copy libraries without unused code, too.
        """
        root = self._copies
        usable = [p for p in planned if p.plan.library.path not in self._unsubstituted]
        reconstruction = reconstruct(
            usable,
            root,
            fill=self.settings.verify.fill_byte,
            compact=compact_options(self.settings),
            copy_all=copy_all,
        )
        if not reconstruction.libraries:
            return reconstruction, None
        path = self.folder / "redirect.table"
        write_table(make_table(root, [c.library.path for c in reconstruction.libraries]), path)
        return reconstruction, path

    def judge(self, attempt: Attempt, plans: Sequence[LibraryPlan]) -> Verdict:
        """The verdict on an attempt; runs what differs on the originals, where asked to."""
        after = attempt.tests
        before = by_nodeid(self.traced.session.tests)
        flaky = self._find_flaky(before, after, attempt.table)
        usage = merge_traces(trace_files(attempt.rounds))
        tests = TestEvidence(
            before=before,
            after=after,
            flaky=flaky,
            used=first_uses(self.traced.usage),
            gpu_tests=count_gpu_tests(usage),
            traced_on={d for plan in plans for d in plan.devices},
            verified_on={d.compute_capability for d in usage.devices},
            problems=(
                *dict.fromkeys(problems_of(attempt.rounds)),
                *check_copies(attempt.reconstruction),
            ),
            statuses=(self.traced.session.exit_status, attempt.rounds[0].session.exit_status),
        )
        verdicts = judge_tests(tests)
        reasons = list(reasons_of_tests(tests, verdicts))
        copied = {c.library.path for c in attempt.reconstruction.libraries}
        evidence = gather(attempt.rounds, usage, copied, self._unsubstituted)
        libraries = tuple(
            judge_libraries(
                plans,
                attempt.reconstruction,
                evidence,
                self.traced.loaded,
                tests_agree=not reasons,
            )
        )
        reasons += reasons_of_libraries(libraries, self.traced.loaded)
        return Verdict(
            format_version=VERDICT_VERSION,
            run_id=self.traced.run_id,
            proved=not reasons,
            reasons=tuple(reasons),
            command=self.rounds.program.command,
            exit_status=attempt.rounds[0].status,
            fill=self.settings.verify.fill_byte,
            copies=self.settings.verify.copies.value,
            granularity=next((plan.granularity for plan in plans), Granularity.ELEMENT.value),
            gpu_tests=tests.gpu_tests,
            created_ns=time.time_ns(),
            devices=usage.devices,
            versions=_versions(usage),
            libraries=libraries,
            tests=verdicts,
            rounds=tuple(map(_facts, self.rounds.done)),
        )

    def _find_flaky(
        self,
        before: Mapping[str, TestResult],
        after: Mapping[str, TestResult],
        table: Path | None,
    ) -> frozenset[str]:
        """Tests that differ, and of which originals and copies give both outcomes alike.

        So a test that only ever passes on the originals isn't one, nor is one that only ever
        fails on the copies; nor one that lost its CUDA context.
        """
        different = [
            d.nodeid
            for d in iter_differences(before, after)
            if d.before is not None and d.after is not None and d.gpu_error is None
        ]
        as_after: set[str] = set()
        as_before: set[str] = set()
        for _ in range(self.settings.verify.rerun):
            left = [n for n in different if n not in as_after or n not in as_before]
            if not left:
                break
            tests = format_items(len(left), "test differs", "tests differ")
            self.say(f"negativa: {tests}; running what differs on originals and copies again")
            originals = self._outcomes(RoundKind.ORIGINAL, left, None)
            as_after.update(n for n in left if originals.get(n) is after[n].outcome)
            copies = self._outcomes(RoundKind.VERIFY, left, table)
            as_before.update(n for n in left if copies.get(n) is before[n].outcome)
        return frozenset(as_after & as_before)

    def _outcomes(
        self, kind: RoundKind, tests: Sequence[str], table: Path | None
    ) -> dict[str, Outcome]:
        rounds = self.rounds.run(kind, tests, table)
        return {test.nodeid: test.outcome for r in rounds for test in settled_tests(r)}

    def write(self, verdict: Verdict) -> Path:
        """Write ``verdict.json`` into the verification's folder and the run's."""
        write_record(self.folder / "verdict.json", verdict, indent=1)
        write_record(self._record, verdict, indent=1)
        return self._record


def compact_options(settings: Settings) -> CompactOptions | None:
    """How copies are made smaller; None if they aren't."""
    return CompactOptions() if settings.verify.copies is CopyKind.COMPACTED else None


def exit_code(verdict: Verdict) -> int:
    """The program's own where the plan is proved, with 128 added for a signal; else 1."""
    status = verdict.exit_status or 0
    own = status if status >= 0 else 128 - status
    return own if verdict.proved else 1


def _written_line(reconstruction: Reconstruction, planned: Sequence[AnalyzedLibrary]) -> str:
    copies = reconstruction.libraries
    reused = sum(c.reused for c in copies)
    text = f"negativa: {format_items(len(copies), 'library', 'libraries')} copied with "
    if any(c.compaction is not None for c in copies):
        before = sum(c.library.size for c in copies)
        after = sum(c.compaction.size if c.compaction else c.library.size for c in copies)
        text += f"{format_bytes(before)} made {format_bytes(after)}"
    else:
        text += f"{format_bytes(sum(c.unused_bytes for c in copies))} of GPU code overwritten"
    return f"{text} ({reused} unchanged since last time)" if reused else text


def _why_not_substituted(plans: Sequence[LibraryPlan], root: Path) -> dict[str, str]:
    """By real path: why a library can't be replaced by its copy on this machine."""
    paths = [plan.library.path for plan in plans]
    if (everywhere := why_unsupported()) is not None:
        return dict.fromkeys(paths, everywhere)
    return {path: why for path in paths if (why := why_not_replaceable(root, path)) is not None}


def _versions(usage: Usage) -> Versions:
    drivers = {d.driver_version for d in usage.devices if d.driver_version}
    return Versions(
        pytest_negativa=version("pytest-negativa"),
        python=platform.python_version(),
        platform=platform.platform(),
        libc=" ".join(platform.libc_ver()),
        cuda_driver=", ".join(sorted(drivers)) or None,
    )


def _facts(result: RoundResult) -> RoundFacts:
    return RoundFacts(
        name=result.name,
        kind=result.kind.value,
        tests=len(result.session.tests),
        status=result.status,
        silent=result.silent,
        seconds=round(result.seconds, 3),
    )
