"""A verification: copies (overwritten or compacted), rounds on them, reruns on the originals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from pytest_negativa.errors import StoreError
from pytest_negativa.installed.sites import find_code_distributions, find_site
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.reconstruction import NO_COPIES, Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import CopyKind, Settings
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Usage
from pytest_negativa.models.verdict import NEEDS, STAYING, Need, ProvedLibrary, Verdict
from pytest_negativa.pages.auditors import why_unwatchable
from pytest_negativa.pages.gather import add_touched, with_pages
from pytest_negativa.pages.page_watch import watch_pages
from pytest_negativa.planning.keep_needed import keep_needed
from pytest_negativa.processes.file_users import FileUser, processes_with_driver, wait_for_users
from pytest_negativa.processes.open_watch import CopyWatch, OpenWatch
from pytest_negativa.processes.redirect import (
    REDIRECT,
    redirect_environment,
    why_not_replaceable,
    why_unsupported,
    write_table,
)
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.units import format_items
from pytest_negativa.rewriting.compact.records import CompactOptions
from pytest_negativa.rewriting.reconstruct import check_copies, hold_copies, reconstruct
from pytest_negativa.storage.atomic import remove_file, write_atomically
from pytest_negativa.storage.handover import identify_process
from pytest_negativa.storage.outcomes import by_nodeid
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import (
    load_healed,
    load_plans,
    save_healed,
    save_plans,
)
from pytest_negativa.storage.rounds import load_round
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.shared_folders import make_logs_folder
from pytest_negativa.tracing.command import traced_changes
from pytest_negativa.tracing.merge import STILL_RUNNING, merge_when_ended
from pytest_negativa.verifying.evidence import (
    Attempt,
    gather_loads,
    problems_of,
    trace_files,
)
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.page_proof import gather_pages
from pytest_negativa.verifying.round_runner import RoundRunner
from pytest_negativa.verifying.rounds import RoundResult, run_all
from pytest_negativa.verifying.same_outcome import (
    Ends,
    accepted_failures,
    ends_of,
    undecided_tests,
)
from pytest_negativa.verifying.traced_run import TracedRun
from pytest_negativa.verifying.tripwire import Touches, arm, read_touches
from pytest_negativa.verifying.used_again import used_again, why_unknown
from pytest_negativa.verifying.used_originals import (
    NamedUses,
    find_twins,
    held_originals,
    judge_files,
    lingering_processes,
    opened_originals,
    unused_paths,
)


class Verification:
    """One verification of a traced run: rounds of its tests on copies of its libraries.

    Args:
        runner: runs its rounds. They trace CPU code if the traced run did.
    """

    def __init__(self, traced: TracedRun, settings: Settings, runner: RoundRunner) -> None:
        self._touched: HostUsage | None = None
        self._cpu = settings.cpu and traced.run.page_log_files.exists()
        self.traced = traced
        self.program = runner.program
        self.settings = settings
        self.folder = traced.run.new_verification()
        # An earlier verdict must not outlive a verification that is interrupted.
        remove_file(traced.run.verdict_file)
        self._on_copies = True
        self.copies = RunsFolder(Path(settings.directory)).copies
        self._runner = runner
        self._rounds: list[RoundResult] = []
        self._unopened = [path for plan in traced.files for path in unused_paths(plan)]
        self._originals: Ends = {}
        self._again: list[Need] = []
        self._held: tuple[tuple[str, FileUser], ...] = ()
        # By path: the original.
        self._copy_files: Mapping[str, str] = {}
        # See ``arm``.
        self._armed: Mapping[str, tuple[Span, ...]] = {}
        self._lingering: tuple[str, ...] = ()

    def attempt(self, planned: Sequence[AnalyzedLibrary] | None) -> Attempt:
        """Write the copies, run all tests on them, and gather the facts for a verdict.

        Args:
            planned: what is proved; None: nothing, the tests run on the originals.

        Raises:
            NegativaError: the copies can't be written.
        """
        self._held = self._lingering = ()
        was_traced, self._on_copies = self._traces_cpu, planned is not None
        if self._traces_cpu and not was_traced:
            # Whether these tests need more CPU code, nobody saw.
            self._originals = {}
        self._remove_tables()
        reconstruction = self._write_copies(planned)
        planned = planned or ()
        planned = planned or ()
        rounds = self._run(RoundKind.VERIFY, None)
        self._lingering += self._users_of_copies()
        usage = merge_when_ended(lambda: trace_files(rounds))
        opens = [r.opens for r in rounds]
        named = NamedUses(self.settings.verify.opened_originals, [p.plan.library for p in planned])
        started_since, held = held_originals(self._held, self._since, self._twins, named)
        opened, noted = opened_originals(opens, self._twins, self._copy_files, named)
        attempt = Attempt(
            traced=self.traced,
            plans=tuple(p.plan for p in planned),
            program=self.program,
            settings=self.settings.verify,
            reconstruction=reconstruction,
            rounds=rounds,
            all_rounds=tuple(self._rounds),
            usage=usage,
            compare_launches=self.settings.trace.level.counts_launches
            and bool(self.traced.usage.launches),
            originals=self._originals,
            again=tuple(self._again),
            loads=gather_loads(
                rounds,
                usage,
                reconstruction,
                self._unsubstituted,
                traces_children=self.settings.trace.children,
            ),
            opened={**started_since, **opened},
            held={**held, **noted},
            files=self._judge_files(),
            armed=self._armed,
            touches=read_touches(rounds, planned, reconstruction) if self._armed else Touches(),
            problems=(
                *dict.fromkeys(problems_of(rounds)),
                *(lack.text for lack in usage.incomplete if lack.code == STILL_RUNNING),
                *check_copies(reconstruction),
                *lingering_processes(self._lingering),
            ),
            versions=_versions(usage),
            ended_ns=time.time_ns(),
        )
        attempt = self._rerun(attempt)
        if self._traces_cpu:
            attempt = gather_pages(attempt)
            self._touched = attempt.pages and attempt.pages[1]
        return attempt

    def _rerun(self, attempt: Attempt) -> Attempt:
        """Run the tests that differ or failed on the originals, in one start.

        What the originals do, too, is chance, such as unseeded data: tests that differ are repeated
        until both ends were seen. It excuses no need of removed code. What these tests use there
        stays.
        """
        verify, known = self.settings.verify, self._originals
        before = by_nodeid(self.traced.session.tests)
        # Tests that failed alike ran there once at most; if they differ now, that does not do.
        differing, failing = (
            tuple(
                nodeid
                for nodeid in choose(before, attempt.after, verify.tolerate)
                if self.program.is_pytest and len(known.get(nodeid, ())) < runs
            )
            for choose, runs in ((undecided_tests, 2), (accepted_failures, 1))
        )
        if verify.rerun == 0 or not (differing or failing):
            return attempt
        verdict = judge(attempt) if attempt.plans else None
        missing = verdict.unmet if verdict is not None else ()
        if verdict is not None and not (differing or verdict.proved):
            failing = ()
        again = tuple(dict.fromkeys((*differing, *failing)))
        if not again or any(d.witness in NEEDS for d in missing):
            return attempt
        why = (
            format_items(len(differing), "test differs", "tests differ")
            if differing
            else format_items(len(failing), "failed test", "failed tests") + " may need more"
        )
        repeated = {nodeid: before[nodeid].outcome is Outcome.PASSED for nodeid in differing}
        rounds = self._run(RoundKind.ORIGINAL, again, repeated, why)
        self._originals = {**known, **ends_of(rounds)}
        lacks = tuple(self._note_use(rounds))
        return dataclasses.replace(
            attempt,
            originals=self._originals,
            again=tuple(self._again),
            all_rounds=tuple(self._rounds),
            problems=tuple(
                dict.fromkeys((*attempt.problems, *lacks, *lingering_processes(self._lingering)))
            ),
            files=self._judge_files(),
        )

    def _note_use(self, rounds: Sequence[RoundResult]) -> Iterator[str]:
        """Note what tests used that ran again; reasons for which that is not known.

        Raises:
            NegativaError: a log is damaged.
            StoreError: a log can't be read.
        """
        for result in rounds:
            usage = merge_when_ended(result.run.trace_files)
            if (lack := why_unknown(usage, self.traced.usage)) is not None:
                yield f"tests ran again on the originals, and more may have been used there: {lack}"
            usage = with_pages(usage, result.run)
            self._again += used_again(self.traced.planned, usage, self.settings.keep.ptx.value)

    def _judge_files(self) -> tuple[ProvedLibrary, ...]:
        folders = (str(Path(plan.library.path).parent) for plan in self.traced.files)
        found = (one.map_code_files().library for one in find_code_distributions(folders))
        installed = {(library.path, library.sha256 or "") for library in found}
        return tuple(judge_files(self.traced.files, [r.opens for r in self._rounds], installed))

    def _write_copies(self, planned: Sequence[AnalyzedLibrary] | None) -> Reconstruction:
        """Write the copies, and what of them is armed; none for rounds on the originals."""
        made = NO_COPIES
        if planned is not None:
            with Progress("writing copies") as progress:
                made = reconstruct(
                    [p for p in planned if p.plan.library.path not in self._unsubstituted],
                    self.copies,
                    compact=compact_options(self.settings),
                    hashed=[used.library for used in self.traced.usage.libraries],
                    on_done=progress.update,
                )
            self._runner.say(_written_line(made))
        self._copy_files = {copy.copy: copy.library.path for copy in made.libraries}
        rows, self._armed = arm(planned or (), made, self.traced.usage)
        if rows:
            write_atomically(self.folder.armed_file, rows)
        else:
            remove_file(self.folder.armed_file)  # of an earlier attempt
        return made

    @property
    def _traces_cpu(self) -> bool:
        """Whether rounds trace CPU code, which compacted copies have elsewhere."""
        return self._cpu and not (self._on_copies and compact_options(self.settings))

    def _remove_tables(self) -> None:
        """Remove the tables of rounds whose supervisor was killed."""
        for table in Path(self.settings.directory).glob("*/verify/*/*/redirect.table"):
            with contextlib.suppress(StoreError):
                killed = load_round(Run(table.parent).round_file)
                is_here = killed.pid_namespace == identify_process().namespace
                if is_here and not Path(f"/proc/{killed.supervisor}").exists():
                    remove_file(table)

    def _environ(self, run: Run, used: Mapping[str, str], *, restricts: bool) -> Mapping[str, str]:
        """The environment in which the program of a round gets the copies, or the originals.

        What it touches is recorded: of copies what is armed, of the originals all GPU code.
        """
        environ, runs = self.program.environ, Path(self.settings.directory)
        if used:
            make_logs_folder(run.redirect_logs, runs)
            write_table(run.redirect_table, self.copies, used.values())
            environ = {
                **environ,
                **redirect_environment(environ, run.redirect_table, run.redirect_logs),
            }
        armed = self.folder.armed_file if restricts and self.folder.armed_file.exists() else None
        is_watched = armed is not None or self._traces_cpu or not restricts
        if is_watched and why_unwatchable() is None:
            environ = watch_pages(environ, run, runs, cpu=self._traces_cpu, armed=armed)
        return environ

    def _run(
        self,
        kind: RoundKind,
        tests: Sequence[str] | None,
        repeated: Mapping[str, bool] | None = None,
        why: str = "",
    ) -> tuple[RoundResult, ...]:
        """Run rounds of a kind until all tests have an outcome; see ``run_all``.

        Args:
            tests: node ids; None: all that the command selects.
            repeated: see ``Round``.
            why: the reason, for people.
        """

        def once(tests: Sequence[str] | None) -> RoundResult:
            return self._run_once(kind, tests, repeated, why)

        expected = [test.nodeid for test in self.traced.session.tests]
        return tuple(run_all(once, tests, expected))

    def _run_once(
        self,
        kind: RoundKind,
        tests: Sequence[str] | None,
        repeated: Mapping[str, bool] | None,
        why: str,
    ) -> RoundResult:
        self._lingering += self._users_of_copies()
        run = Run(self.folder.folder / f"{len(self._rounds) + 1:03}-{kind.value}")
        restricts = kind is RoundKind.VERIFY
        used = dict(self._copy_files) if restricts else {}
        where = "on the originals"
        if restricts:
            where = "on the copies" if self._on_copies else "tracing CPU code"
        environ = self._environ(run, used, restricts=restricts)
        if not self.program.is_pytest:
            level = self.settings.trace.level
            environ = {**environ, **traced_changes(environ, run, self.program.root, level)}
        originals = [*used.values(), *(self._twins if used else ())]
        watch = OpenWatch([*originals, *self._unopened])
        copies = CopyWatch(used, os.path.realpath(REDIRECT))
        # No other process may rewrite the copies while the tests run on them.
        held = hold_copies(self.copies) if used else contextlib.nullcontext()
        with held, watch, copies:
            # What begins to use an original from now on is seen by the watch.
            self._held += wait_for_users(originals, self._since)
            try:
                result = self._runner.run(
                    kind, run, environ, where, tests=tests, repeated=repeated, why=why
                )
            finally:
                # Who keeps the environment of a round gets the originals later, which shows.
                remove_file(run.redirect_table)
        if restricts:
            self._lingering += tuple(processes_with_driver(self.traced.run_id, str(run)))
        opens = dataclasses.replace(
            watch.opens,
            unseen={**copies.opens.unseen, **watch.opens.unseen},
            strangers=copies.opens.strangers,
        )
        result = dataclasses.replace(result, opens=opens)
        self._rounds.append(result)
        return result

    def _users_of_copies(self) -> tuple[str, ...]:
        """In words: processes that use a copy between rounds, or after the last one."""
        users = wait_for_users(self._copy_files, self._since, os.path.realpath(self.copies))
        return tuple(user.who for _, user in users)

    def write(self, verdict: Verdict) -> None:
        """Write into the run's trace and its plans what stays, and ``verdict.json``."""
        # First: without these, a lock by the verdict would remove what the rounds used.
        if self._touched is not None:
            add_touched(self.traced.run, self._touched, time.time_ns())
        kept = [need for need in verdict.needs if need.kept and need.witness in STAYING]
        if verdict.proved and kept:
            self.keep(kept)
        write_record(self.folder.verdict_file, verdict, indent=1)
        write_record(self.traced.run.verdict_file, verdict, indent=1)

    def keep(self, needs: Collection[Need]) -> None:
        """Write into the run's plans that this code stays, also if they are made again."""
        run = self.traced.run
        save_healed(run, (*load_healed(run), *needs))
        save_plans(run, [keep_needed(plan, needs) for plan in load_plans(run)])

    @cached_property
    def _unsubstituted(self) -> Mapping[str, str]:
        """By real path: why a library can't be replaced by its copy on this machine."""
        paths = [plan.library.path for plan in self.traced.plans]
        if (everywhere := why_unsupported()) is not None:
            return dict.fromkeys(paths, everywhere)
        programs = {os.path.realpath(p.header.executable) for p in self.traced.usage.processes}
        reasons = {path: why_not_replaceable(self.copies, path, programs) for path in paths}
        return {path: reason for path, reason in reasons.items() if reason is not None}

    @property
    def _since(self) -> float:
        """When the traced run began, seconds since the epoch."""
        starts = [process.header.start_ns for process in self.traced.usage.processes]
        return min(starts, default=0) / 1e9

    @cached_property
    def _twins(self) -> Mapping[str, str]:
        """Twins in the project and where this environment's or a planned library's packages are."""
        planned = [plan.library for plan in self.traced.plans]
        sites = (find_site(Path(library.path)) for library in planned)
        folders = [self.program.root, self.program.cwd, *filter(None, sites)]
        # The supervisor adds the folder of this package, which no test may have.
        own = Path(__file__).parents[2]
        folders += [Path(name) for name in filter(None, sys.path) if Path(name) != own]
        # A wheel may have libraries in the environment's lib.
        folders += [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
        return find_twins(folders, planned, [self.settings.directory])


def compact_options(settings: Settings) -> CompactOptions | None:
    """Options to compact copies; None to overwrite unused code."""
    return None if settings.verify.copies is CopyKind.OVERWRITTEN else CompactOptions()


def _written_line(reconstruction: Reconstruction) -> str:
    copies = reconstruction.libraries
    reused = sum(c.reused for c in copies)
    text = f"negativa: {format_items(len(copies), 'library', 'libraries')} copied with "
    if any(c.compaction is not None for c in copies):
        before = sum(c.library.size for c in copies)
        after = sum(c.compaction.size if c.compaction else c.library.size for c in copies)
        text += f"{format_bytes(before)} made {format_bytes(after)}"
    else:
        text += f"{format_bytes(sum(c.unused_bytes for c in copies))} of GPU code overwritten"
    if left := sum(c.not_compacted is not None for c in copies):
        text += f", {left} overwritten instead of compacted"
    return f"{text} ({reused} unchanged since last time)" if reused else text


def _versions(usage: Usage) -> dict[str, str]:
    drivers = {d.driver_version for d in usage.devices if d.driver_version}
    found = {
        "pytest-negativa": version("pytest-negativa"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cuda-driver": ", ".join(sorted(drivers)),
    }
    return {name: text for name, text in found.items() if text}
