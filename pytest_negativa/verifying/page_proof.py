"""Proves that tests need no page of CPU code that their traced run did not touch.

The tests run once more on the original libraries, and are traced again: the touch is the verdict.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from pytest_negativa.errors import refusing
from pytest_negativa.hostcode.gather import require_usage, traced_pages
from pytest_negativa.hostcode.page_logs import (
    LOG_SUFFIX,
    PAGE,
    LoggedLibrary,
    count_lost,
    read_page_logs,
)
from pytest_negativa.hostcode.processor import read_processor
from pytest_negativa.hostcode.start import begin_logs
from pytest_negativa.hostcode.usage import (
    FileKey,
    FilePages,
    describe,
    file_key,
    identify,
    key_of,
)
from pytest_negativa.models.hostcode import HostFile, Processor
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import PAGE_VERDICT_VERSION, PageVerdict, ProvedPages
from pytest_negativa.processes.page_watch import watch_environment
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.atomic import remove_file
from pytest_negativa.storage.outcomes import by_nodeid
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import load_usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.shared_folders import make_logs_folder
from pytest_negativa.tracing.merge import merge_traces, merge_when_ended
from pytest_negativa.verifying.evidence import problems_of, trace_files
from pytest_negativa.verifying.judge import (
    TestEvidence,
    facts_of,
    judge_tests,
    reasons_of_outcomes,
    session_status,
)
from pytest_negativa.verifying.originals import ends_of, known_of_originals, undecided_tests
from pytest_negativa.verifying.process_ends import reasons_of_ends
from pytest_negativa.verifying.round_runner import RoundRunner
from pytest_negativa.verifying.rounds import RoundResult, conclusive_tests, run_all
from pytest_negativa.verifying.traced_run import TracedRun

# Tests that are scheduled otherwise in each run may need more pages each time.
_MOST_HEALINGS = 3

UNAUDITED = (
    "A static or set-user-ID program, or one started without LD_AUDIT, leaves no mark, and the "
    "proof says nothing of it."
)
UNCOMPARED = (
    "Without a GPU trace, the proof compares the exit status of the first process alone, not those "
    "of its children."
)


@dataclass(frozen=True, slots=True)
class TracedPages:
    """What the processes of the rounds did with one library.

    Attributes:
        file: one with its content that the traced run loaded.
        traced: what the traced run did with it.
        found: by process: what it did with a file of this content in the rounds.
    """

    file: HostFile
    traced: FilePages
    found: tuple[LoggedLibrary, ...]


@dataclass(frozen=True, slots=True)
class PageAttempt:
    """One run of all tests, traced once more: every fact that its verdict follows from.

    Attributes:
        run_id: the traced run.
        tests: how the tests ended, and what else speaks against the run.
        libraries: those with untouched pages.
        incomplete: why the traced run may have touched more than is known.
        unknown: why the content of a library of the rounds is not known.
        compares_ends: whether the ends of other processes than the first are compared.
        lost: how many libraries were loaded without a record in the rounds.
        rounds: every start of the program.
    """

    run_id: str
    tests: TestEvidence
    libraries: tuple[TracedPages, ...]
    incomplete: tuple[str, ...]
    unknown: tuple[str, ...]
    compares_ends: bool
    lost: int
    rounds: tuple[RoundResult, ...]
    processor: Processor


def judge_pages(attempt: PageAttempt) -> PageVerdict:
    """The verdict that follows from an attempt. Pure: nothing here touches a file."""
    tests = judge_tests(attempt.tests)
    rows = tuple(map(_judge_library, attempt.libraries))
    reasons = [f"the traced run is not complete: {text}" for text in attempt.incomplete]
    reasons += [f"the proof is not complete: {text}" for text in attempt.unknown]
    reasons += reasons_of_outcomes(attempt.tests, tests)
    if attempt.lost:
        reasons.append(f"{attempt.lost:,} loads of libraries were not recorded")
    pages = sum(span.size for row in rows for span in row.missed) // PAGE
    if pages:
        reasons.append(
            f"{format_items(pages, 'page was', 'pages were')} touched that the traced run did not "
            "touch; --negativa-heal adds them to the trace"
        )
    others = [row for row in rows if row.detail is not None and not row.missed]
    reasons += [f"{row.path}: {row.detail}" for row in others if not row.left_out]
    if all(row.left_out for row in rows):
        reasons.append("no process loaded a library with untouched pages")
    return PageVerdict(
        format_version=PAGE_VERDICT_VERSION,
        run_id=attempt.run_id,
        proved=not reasons,
        reasons=tuple(reasons),
        processor=attempt.processor,
        limits=(UNAUDITED,) if attempt.compares_ends else (UNAUDITED, UNCOMPARED),
        libraries=rows,
        tests=tests,
        rounds=tuple(map(facts_of, attempt.rounds)),
    )


def _judge_library(library: TracedPages) -> ProvedPages:
    file = library.file
    traced = describe(file, library.traced)
    missed = _missed(library)
    detail = None
    if missed:
        detail = f"{format_items(len(missed), 'page is', 'pages are')} needed, too"
    elif not library.found:
        detail = "left out: no process of the proof loaded it"
    elif not all(one.watched for one in library.found):
        detail = "a process could touch all of its pages"
    return ProvedPages(
        path=file.path,
        sha256=file.sha256,
        untouched_bytes=traced.watched_bytes - traced.touched_bytes,
        processes=len(library.found),
        missed=describe(file, library.traced._replace(touched=missed)).touched,
        detail=detail,
        left_out=not library.found,
    )


def prove_pages(
    run: Run, settings: Settings, runner: RoundRunner, status: int | None = None
) -> PageVerdict:
    """Trace the tests of a traced run once more, and judge.

    If the tests need more pages, the run's trace gets these, and they run again: no two runs touch
    quite the same, and a proof starts other code of this package than a trace. ``healing`` does so
    more often.

    Args:
        runner: runs the rounds.
        status: exit status of the traced process; None if no supervisor saw it.

    Raises:
        NegativaError: files of the run can't be read or written.
        Interrupted: a signal asked this process to end.
    """
    proof = PageProof(run, settings, runner)
    verdict = proof.prove(status)
    for _ in range(_MOST_HEALINGS if settings.healing else 1):
        if not any(row.missed for row in verdict.libraries):
            break
        runner.say("negativa: the trace of CPU code gets what the tests needed, too")
        proof.add_to_trace()
        proof = PageProof(run, settings, runner)
        verdict = proof.prove(status)
    return verdict


def _missed(library: TracedPages) -> frozenset[int]:
    """Addresses of the pages that only the rounds touched."""
    touched: frozenset[int] = frozenset().union(*(one.pages for one in library.found))
    return touched - library.traced.touched


class PageProof:
    """One proof: runs the tests, and reads what they touched.

    Args:
        runner: runs its rounds.
    """

    def __init__(self, run: Run, settings: Settings, runner: RoundRunner) -> None:
        self._run = run
        self._settings = settings
        self._runner = runner
        self._session = runner.session
        self._folder = run.new_verification()
        self._rounds: list[RoundResult] = []

    def prove(self, status: int | None) -> PageVerdict:
        """Run the tests of the traced run once more, and judge.

        Args:
            status: exit status of the traced process; None if no supervisor saw it.

        Raises:
            NegativaError: files of the run can't be read or written.
            Interrupted: a signal asked this process to end.
        """
        # An earlier verdict must not outlive a proof that is interrupted.
        remove_file(self._run.page_verdict_file)
        incomplete = require_usage(self._run).incomplete
        loaded = traced_pages(self._run)
        rounds = self._run_all(RoundKind.VERIFY, None)
        before, after = by_nodeid(self._session.tests), conclusive_tests(rounds)
        found, unknown = _by_content(rounds, [file for file, _ in loaded])
        libraries = tuple(
            TracedPages(file, pages, tuple(found[file.sha256]))
            for file, pages in _unite_contents(loaded)
        )
        attempt = PageAttempt(
            run_id=self._run.run_id,
            tests=TestEvidence(
                before=before,
                after=after,
                on_originals=self._known_of_originals(before, after),
                used={},
                gpu_tests=0,
                traced_on=(),
                verified_on=(),
                problems=(*problems_of(rounds), *self._ends(rounds, status)),
                statuses=(self._session.exit_status, session_status(rounds)),
                tolerate=self._settings.verify.tolerate,
            ),
            libraries=libraries,
            incomplete=incomplete,
            unknown=unknown,
            compares_ends=bool(self._run.trace_files()),
            lost=sum(count_lost(r.run.page_logs) for r in rounds),
            rounds=tuple(self._rounds),
            processor=read_processor(),
        )
        verdict = judge_pages(attempt)
        write_record(self._run.page_verdict_file, verdict, indent=1)
        return verdict

    def add_to_trace(self) -> None:
        """Add what the rounds touched to the trace of the run.

        Raises:
            StoreError: a file can't be read or written.
        """
        logs = [r.run.page_logs for r in self._rounds if r.kind is RoundKind.VERIFY]
        with refusing(self._run.page_logs, "written"):
            for path in chain.from_iterable(folder.glob(f"*{LOG_SUFFIX}") for folder in logs):
                shutil.copy2(path, self._run.page_logs)

    def _ends(self, rounds: Sequence[RoundResult], status: int | None) -> Iterator[str]:
        traced = TracedRun(
            run=self._run,
            planned=(),
            usage=load_usage(self._run) or merge_traces(()),
            session=self._session,
            status=status,
        )
        return reasons_of_ends(rounds, merge_when_ended(lambda: trace_files(rounds)), traced)

    def _known_of_originals(
        self, before: Mapping[str, TestResult], after: Mapping[str, TestResult]
    ) -> frozenset[str]:
        """Rerun tests that differ on all pages: which of them are flaky?"""
        verify = self._settings.verify
        differing = tuple(undecided_tests(before, after, verify.tolerate))
        if not (differing and verify.rerun != 0 and self._runner.program.is_pytest):
            return frozenset()
        why = format_items(len(differing), "test differs", "tests differ")
        ends = ends_of(self._run_all(RoundKind.ORIGINAL, differing, repeated=differing, why=why))
        return known_of_originals(before, after, ends, verify.tolerate)

    def _run_all(
        self,
        kind: RoundKind,
        tests: Sequence[str] | None,
        repeated: Sequence[str] = (),
        why: str = "",
    ) -> tuple[RoundResult, ...]:
        expected = [test.nodeid for test in self._session.tests]
        once = partial(self._run_once, kind, repeated, why)
        return tuple(run_all(once, tests, expected))

    def _run_once(
        self,
        kind: RoundKind,
        repeated: Sequence[str],
        why: str,
        tests: Sequence[str] | None,
    ) -> RoundResult:
        run = self._folder.round(f"{len(self._rounds) + 1:03}-{kind.value}")
        environ = dict(self._runner.program.environ)
        where = "on the originals"
        if kind is RoundKind.VERIFY:
            where = "tracing CPU code"
            make_logs_folder(run.page_logs, Path(self._settings.directory))
            begin_logs(run)
            environ |= watch_environment(environ, run.page_logs)
        result = self._runner.run(
            kind, run, environ, where, tests=tests, repeated=repeated, why=why
        )
        self._rounds.append(result)
        return result


def _identity(key: FileKey) -> tuple[int, ...]:
    """What ``pages.c`` knows a file by: a file may have several paths."""
    return (key.device, key.inode, key.size, key.mtime_ns)


def _unite_contents(
    traced: Iterable[tuple[HostFile, FilePages]],
) -> Iterator[tuple[HostFile, FilePages]]:
    """By content: a file, and what was touched of any; only what all processes watched."""
    groups: dict[str, list[tuple[HostFile, FilePages]]] = defaultdict(list)
    for item in traced:
        groups[item[0].sha256].append(item)
    for group in groups.values():
        if all(pages.watched for _, pages in group):
            ranges = frozenset().union(*(pages.ranges for _, pages in group))
            touched = frozenset().union(*(pages.touched for _, pages in group))
            yield group[0][0], FilePages(ranges, touched, watched=True)


def _by_content(
    rounds: Sequence[RoundResult], files: Iterable[HostFile]
) -> tuple[Mapping[str, list[LoggedLibrary]], tuple[str, ...]]:
    """By hash: what each process of the rounds did; why a content is not known."""
    contents: dict[tuple[int, ...], str | None] = {
        _identity(file_key(file)): file.sha256 for file in files
    }
    found: dict[str, list[LoggedLibrary]] = defaultdict(list)
    unknown = []
    for result in rounds:
        for process in read_page_logs(result.run.page_logs):
            for one in process.libraries:
                key = key_of(one)
                identity = _identity(key)
                if identity not in contents:
                    content = identify(key)
                    contents[identity] = content.sha256 if isinstance(content, HostFile) else None
                    if not isinstance(content, HostFile):
                        unknown.append(content)
                sha256 = contents[identity]
                if sha256 is not None:
                    found[sha256].append(one)
    return found, tuple(dict.fromkeys(unknown))
