"""The proof of CPU code by a second watched run: pages that it alone touched, libraries left out.

The tests run once more, and are traced again: on the copies of a proof of GPU code, if there is
one, else on the originals. What this run alone touches joins the trace, and is not claimed. A
touched page served the original's bytes, so the run was that of the wider trace: a third one would
show nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.errors import refusing
from pytest_negativa.hostcode.gather import load_files, require_usage, unite
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.hostcode import FileKey, HostFile, HostLibrary, HostUsage
from pytest_negativa.models.reconstruction import (
    FILL,
    RECONSTRUCTION_VERSION,
    Reconstruction,
)
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.spans import minus, size
from pytest_negativa.models.verdict import PAGE_VERDICT_VERSION, PageVerdict, ProvedPages
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import load_usage
from pytest_negativa.storage.runs import PAGES_SUFFIX, Run, files_in
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.verifying.evidence import Attempt
from pytest_negativa.verifying.judge import (
    TestEvidence,
    evidence_of_tests,
    facts_of,
    judge_tests,
    reasons_of_outcomes,
)
from pytest_negativa.verifying.round_runner import RoundRunner
from pytest_negativa.verifying.rounds import RoundResult
from pytest_negativa.verifying.traced_run import TracedRun
from pytest_negativa.verifying.verification import Verification

UNAUDITED = (
    "A static or set-user-ID program, or one started without LD_AUDIT, leaves no mark, and the "
    "proof says nothing of it."
)
UNCOMPARED = (
    "Without a GPU trace, the proof compares the exit status of the first process alone, not those "
    "of its children."
)


def judge_pages(
    evidence: TestEvidence,
    traced: HostUsage,
    found: HostUsage,
    rounds: Sequence[RoundResult],
    *,
    run_id: str,
    compares_ends: bool,
) -> PageVerdict:
    """The verdict that follows from one run of all tests. Pure: nothing here touches a file.

    Args:
        evidence: how the tests ended, and what else speaks against the run.
        traced, found: the pages that the traced run and the rounds touched.
        rounds: every start of the program.
        run_id: the traced run.
        compares_ends: whether the ends of other processes than the first are compared.
    """
    libraries = {library.sha256: library for library in found.libraries}
    tests = judge_tests(evidence)
    rows = tuple(
        _judge_library(library, libraries.get(library.sha256))
        for library in traced.libraries
        if library.unwatched is None
    )
    reasons = [f"the traced run is not complete: {text}" for text in traced.incomplete]
    reasons += [f"the proof is not complete: {text}" for text in found.incomplete]
    reasons += reasons_of_outcomes(evidence, tests)
    against = [row for row in rows if row.detail is not None and not row.left_out]
    reasons += [f"{row.path}: {row.detail}" for row in against]
    if all(row.left_out for row in rows):
        reasons.append("no process loaded a library with untouched pages")
    return PageVerdict(
        format_version=PAGE_VERDICT_VERSION,
        run_id=run_id,
        proved=not reasons,
        reasons=tuple(reasons),
        processor=found.processors[0],
        limits=(UNAUDITED,) if compares_ends else (UNAUDITED, UNCOMPARED),
        libraries=rows,
        tests=tests,
        rounds=tuple(map(facts_of, rounds)),
    )


def _judge_library(traced: HostLibrary, found: HostLibrary | None) -> ProvedPages:
    missed = () if found is None else tuple(minus(found.touched, traced.touched))
    detail = None
    if found is None:
        detail = "left out: no process of the proof loaded it"
    elif found.unwatched is not None:
        detail = "a process could touch all of its pages"
    return ProvedPages(
        path=traced.paths[0],
        sha256=traced.sha256,
        untouched_bytes=traced.watched_bytes - traced.touched_bytes - size(missed),
        missed=missed,
        detail=detail,
        left_out=found is None,
    )


def prove_pages(
    run: Run,
    settings: Settings,
    runner: RoundRunner,
    status: int | None = None,
    attempt: Attempt | None = None,
) -> PageVerdict:
    """Prove the trace of a run's CPU code by one more run of its tests, which is traced, too.

    Args:
        runner: runs the rounds.
        status: exit status of the traced process; None if no supervisor saw it.
        attempt: a run of all tests on copies that traced CPU code; None: they run now.

    Raises:
        NegativaError: files of the run can't be read or written.
        Stopped: a signal asked this process to end.
    """
    proof = _PageProof(run, settings, runner, status)
    return proof.judge(attempt or proof.attempt(()))


class _PageProof(Verification):
    """One proof: reads what tests touched that ran on copies, or runs them on the originals."""

    where = "tracing CPU code"

    def __init__(
        self, run: Run, settings: Settings, runner: RoundRunner, status: int | None
    ) -> None:
        usage = load_usage(run) or merge_traces(())
        traced = TracedRun(run, (), usage, runner.session, status)
        super().__init__(traced, settings, runner, cpu=True)
        self.record = run.page_verdict_file

    def judge(self, attempt: Attempt) -> PageVerdict:
        """Judge what no run touched, add the rest to the traced run, and write the verdict."""
        run = self.traced.run
        pages, files = require_usage(run), load_files(run).files
        known = (*files, *_copies_of(files, attempt.reconstruction))
        # Copies of earlier attempts are gone. What ran again on the originals counts, too.
        again = (r for r in attempt.all_rounds if r.kind is RoundKind.ORIGINAL and r.run.has_pages)
        rounds = [result.run for result in (*attempt.rounds, *again)]
        found = unite([require_usage(one, known) for one in rounds])
        verdict = judge_pages(
            evidence_of_tests(attempt),
            pages,
            found,
            attempt.all_rounds,
            run_id=run.run_id,
            compares_ends=bool(run.trace_files()),
        )
        loaded, traced = ({one.sha256 for one in usage.libraries} for usage in (found, pages))
        if loaded - traced or any(row.missed for row in verdict.libraries):
            self._add_to_trace(rounds, attempt.reconstruction)
        write_record(self.record, verdict, indent=1)
        return verdict

    def _write_copies(self, planned: Sequence[AnalyzedLibrary]) -> Reconstruction:
        return Reconstruction(
            format_version=RECONSTRUCTION_VERSION, root="", fill=FILL, libraries=(), refused={}
        )

    def _add_to_trace(self, rounds: Iterable[Run], reconstruction: Reconstruction) -> None:
        """Add what rounds touched to the trace of the run.

        Raises:
            StoreError: a file can't be read or written.
        """
        run = self.traced.run
        logs, record = run.page_logs, load_files(run)
        files = (*record.files, *_copies_of(record.files, reconstruction))
        write_record(run.page_log_files, replace(record, files=tuple(dict.fromkeys(files))))
        with refusing(logs, "written"):
            for one in rounds:
                for path in files_in(one.page_logs, PAGES_SUFFIX):
                    write_atomically(logs / path.name, path.read_bytes())


def _copies_of(files: Iterable[HostFile], reconstruction: Reconstruction) -> Iterator[HostFile]:
    """Copies as if they were their originals: their CPU code is the same, in the same places."""
    # By content: an original may have been touched, or installed again, since it was traced.
    known = {one.sha256: one for one in files}
    for copy in reconstruction.libraries:
        if (file := known.get(copy.library.sha256 or "")) is not None:
            own = FileKey.of(os.path.realpath(copy.copy), copy.copy_state)
            yield replace(file, file=own, original=copy.library.path)
