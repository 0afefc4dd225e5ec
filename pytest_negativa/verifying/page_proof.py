"""The proof of CPU code by a second watched run: pages that it alone touched, libraries left out.

The tests run once more, and are traced again: on the copies of a proof of GPU code, if there is
one, else on the originals. What this run alone touches joins the trace, and is not claimed. A
touched page served the original's bytes, so the run was that of the wider trace: a third one would
show nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from pytest_negativa.errors import refusing
from pytest_negativa.hostcode.gather import load_files, require_usage, unite
from pytest_negativa.hostcode.page_logs import unwatched_programs
from pytest_negativa.models.hostcode import FileKey, HostFile, HostLibrary, HostUsage
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.spans import PAGE_SIZE, minus, size, union
from pytest_negativa.models.verdict import (
    CpuProof,
    LibraryStatus,
    Need,
    ProvedLibrary,
    Verdict,
    Witness,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import matches_command
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import PAGES_SUFFIX, Run, files_in
from pytest_negativa.verifying.judge import (
    TestEvidence,
    doubt,
    evidence_of_tests,
    facts_of,
    judge_tests,
    reasons_of_outcomes,
    verdict_of,
)
from pytest_negativa.verifying.verification import Verification

UNAUDITED = (
    "A static or set-user-ID program, or one that only ran without the environment of the trace, "
    "leaves no mark, and the proof says nothing of it."
)
_UNWATCHED = (
    "was started without NEGATIVA_PAGES_LOGS and LD_AUDIT, so what CPU code it touches is not "
    "known; pass them on, or accept it in verify.opened_originals (command:GLOB)"
)
UNCOMPARED = (
    "Without a GPU trace, the proof compares the exit status of the first process alone, not those "
    "of its children."
)


def judge_pages(
    tests: TestEvidence,
    traced: HostUsage,
    found: HostUsage,
    *,
    compares_ends: bool,
    unwatched: Iterable[str] = (),
) -> CpuProof:
    """What follows from one run of all tests. Pure: nothing here touches a file.

    Args:
        tests: how the tests ended, and what else speaks against the run.
        traced, found: the pages that the traced run and the rounds touched.
        compares_ends: whether the ends of other processes than the first are compared.
        unwatched: command lines of programs that were started without the environment of the trace.
    """
    verdicts = judge_tests(tests)
    by_content = {library.sha256: library for library in found.libraries}
    rows = tuple(
        _judge_library(library, by_content.get(library.sha256))
        for library in traced.libraries
        if library.unwatched is None
    )
    reasons = [f"the traced run is not complete: {text}" for text in traced.incomplete]
    reasons += [f"the proof is not complete: {text}" for text in found.incomplete]
    reasons += [f"{command}: {_UNWATCHED}" for command in unwatched]
    reasons += reasons_of_outcomes(tests, verdicts)
    reasons += [f"{r.path}: {r.detail}" for r in rows if r.status is LibraryStatus.NOT_PROVED]
    if all(row.status is LibraryStatus.NOT_LOADED for row in rows):
        reasons.append("no process loaded a library with untouched pages")
    return CpuProof(
        proved=not reasons,
        reasons=tuple(reasons),
        processor=found.processors[0],
        limits=(UNAUDITED,) if compares_ends else (UNAUDITED, UNCOMPARED),
        libraries=doubt(rows) if reasons else rows,
        tests=tuple(test for test in verdicts if test.differs and not test.flaky),
    )


def _judge_library(traced: HostLibrary, found: HostLibrary | None) -> ProvedLibrary:
    if found is None:
        status, detail = LibraryStatus.NOT_LOADED, "left out: no process of the proof loaded it"
    elif found.unwatched is not None:
        status, detail = LibraryStatus.NOT_PROVED, "a process could touch all of its pages"
    else:
        status, detail = LibraryStatus.PROVED, None
    left = size(union((*traced.touched, *(() if found is None else found.touched))))
    return ProvedLibrary(
        path=traced.paths[0],
        soname=None,
        build_id=traced.build_id,
        size=traced.size,
        sha256=traced.sha256,
        copy_sha256=None,
        status=status,
        detail=detail,
        code_bytes=traced.watched_bytes,
        unused_bytes=traced.watched_bytes - left,
        elements=traced.watched_bytes // PAGE_SIZE,
        unused_elements=(traced.watched_bytes - left) // PAGE_SIZE,
        trimmed_code_bytes=0,
        left_bytes=left,
        processes=0,
        spans=(),
    )


def missed_pages(traced: HostUsage, found: HostUsage) -> Iterator[Need]:
    """The pages that the proof alone touched, by library."""
    touched = {library.sha256: library.touched for library in found.libraries}
    for library in traced.libraries:
        missed = tuple(minus(touched.get(library.sha256, ()), library.touched))
        if missed and library.unwatched is None:
            places = ", ".join(f"{start:#x}-{end:#x}" for start, end in missed[:5])
            count = format_items(size(missed) // PAGE_SIZE, "page", "pages")
            yield Need(
                witness=Witness.TOUCHED_AGAIN,
                library=library.paths[0],
                spans=missed,
                kernel=f"{count} (file offsets {places})",
                test="the second watched run",
                kept=True,
            )


def prove_pages(verification: Verification, verdict: Verdict | None) -> Verdict:
    """The verdict with the proof of CPU code: by the last run on copies, else by one more run.

    What that run touched joins the traced run.

    Args:
        verdict: on GPU code; None if there is none. If it is proved, the last attempt was a whole
            run, and shows what CPU code the tests need.

    Raises:
        NegativaError: files of the run can't be read or written.
        Stopped: a signal asked this process to end.
    """
    attempt = verification.attempted if verdict is not None and verdict.proved else None
    attempt = attempt or verification.attempt(None)
    run = verification.traced.run
    traced, files = require_usage(run), load_files(run).files
    known = (*files, *_copies_of(files, attempt.reconstruction))
    # Copies of earlier attempts are gone. What ran again on the originals counts, too.
    again = (r for r in attempt.all_rounds if r.kind is RoundKind.ORIGINAL and r.run.has_pages)
    rounds = [result.run for result in (*attempt.rounds, *again)]
    found = unite([require_usage(one, known) for one in rounds])
    tests = evidence_of_tests(attempt)
    logs = dict.fromkeys(one.page_logs for one in (run, *rounds))
    started = dict.fromkeys(command for folder in logs for command in unwatched_programs(folder))
    accepted = verification.settings.verify.opened_originals
    proof = judge_pages(
        tests,
        traced,
        found,
        compares_ends=bool(run.trace_files()),
        unwatched=(c for c in started if not any(matches_command(glob, c) for glob in accepted)),
    )
    missed = tuple(missed_pages(traced, found))
    # Of data, it may have used more than the traced run, too.
    if unite([traced, found]).libraries != traced.libraries:
        _add_to_trace(run, rounds, attempt.reconstruction)
    verdict = verdict or verdict_of(attempt, tests, proof.reasons)
    facts = tuple(map(facts_of, attempt.all_rounds))
    return replace(verdict, needs=(*verdict.needs, *missed), rounds=facts, cpu=proof)


def _add_to_trace(run: Run, rounds: Iterable[Run], reconstruction: Reconstruction) -> None:
    """Add what rounds touched to the trace of a run.

    Raises:
        StoreError: a file can't be read or written.
    """
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
