"""The verdict on CPU code, as a function of its facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pytest_negativa.hostcode.page_logs import PAGE, LoggedLibrary
from pytest_negativa.hostcode.usage import FilePages
from pytest_negativa.models.hostcode import HostFile, Processor
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.spans import Span
from pytest_negativa.reporting.verdict import render_page_verdict
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.judge import TestEvidence
from pytest_negativa.verifying.page_proof import (
    UNAUDITED,
    UNCOMPARED,
    PageAttempt,
    TracedPages,
    judge_pages,
)
from pytest_negativa.verifying.supervisor import why_no_page_proof
from tests.support.faults import PlantedFault
from tests.support.paged import needs_page_watch

RANGES = ((0x1000, 0x9000),)
FILE = HostFile(
    path="/lib/liba.so",
    device=1,
    inode=2,
    size=0x20000,
    mtime_ns=3,
    sha256="a" * 64,
    build_id=None,
    segments=((0, 0x10000, 0x10000),),
)


def logged(*pages: int) -> LoggedLibrary:
    return LoggedLibrary(
        path=FILE.path,
        device=1,
        inode=2,
        size=FILE.size,
        mtime_ns=3,
        watched=True,
        ranges=RANGES,
        pages=pages,
    )


def result(outcome: Outcome) -> TestResult:
    return TestResult(nodeid="t.py::test", outcome=outcome, duration=0.1)


def evidence(after: Outcome = Outcome.PASSED) -> TestEvidence:
    return TestEvidence(
        before={"t.py::test": result(Outcome.PASSED)},
        after={"t.py::test": result(after)},
        on_originals=(),
        used={},
        gpu_tests=0,
        traced_on=(),
        verified_on=(),
    )


def attempt(*found: LoggedLibrary) -> PageAttempt:
    traced = FilePages(frozenset(RANGES), frozenset({0x1000, 0x2000}), True)
    return PageAttempt(
        run_id="run",
        tests=evidence(),
        libraries=(TracedPages(FILE, traced, found),),
        incomplete=(),
        unknown=(),
        compares_ends=False,
        lost=0,
        rounds=(),
        processor=Processor(model="X", flags=()),
    )


def test_pages_that_nothing_touched_are_proved() -> None:
    verdict = judge_pages(attempt(logged(0x1000), logged(0x1000, 0x2000)))
    assert (verdict.proved, verdict.reasons) == (True, ())
    (row,) = verdict.libraries
    assert (row.untouched_bytes, row.processes, row.missed) == (6 * PAGE, 2, ())


@pytest.mark.planted_fault(
    "a handler of SIGSEGV hides that a page of CPU code was needed",
    says="2 pages were touched that the traced run did not touch",
)
def test_a_miss_counts_although_the_tests_pass(fault: PlantedFault) -> None:
    verdict = judge_pages(attempt(logged(0x1000), logged(0x4000, 0x5000)))
    assert not verdict.proved
    fault.check("; ".join(verdict.reasons))
    (row,) = verdict.libraries
    assert row.missed == (Span(0x14000, 0x16000),)


@pytest.mark.planted_fault(
    "a process ran with all pages of a library",
    says="/lib/liba.so: a process could touch all of its pages",
)
def test_a_process_that_watched_nothing(fault: PlantedFault) -> None:
    unwatched = replace(logged(), watched=False)
    fault.check("; ".join(judge_pages(attempt(logged(0x1000), unwatched)).reasons))


@pytest.mark.planted_fault(
    "no process of the proof loads a library, so no touch of it is seen",
    says="libb.so: left out: no process of the proof loaded it",
)
def test_a_library_that_the_proof_did_not_load_is_left_out(fault: PlantedFault) -> None:
    fine = attempt(logged(0x1000))
    (row,) = fine.libraries
    added = TracedPages(structs.replace(FILE, path="/lib/libb.so", inode=7), row.traced, ())
    verdict = judge_pages(replace(fine, libraries=(row, added)))
    assert verdict.proved and [r.path for r in verdict.covered] == [FILE.path]
    text = "\n".join(render_page_verdict(verdict))
    assert "24.6 kB of CPU code in 1 library" in text
    fault.check(text)
    assert not judge_pages(replace(fine, libraries=(added,))).proved


def test_a_touch_under_another_name_of_the_file_counts() -> None:
    for other in {"path": "/linked/liba.so"}, {"inode": 8}:
        assert not judge_pages(attempt(logged(0x1000), replace(logged(0x4000), **other))).proved


def test_the_verdict_states_what_it_does_not_cover() -> None:
    verdict = judge_pages(attempt(logged(0x1000)))
    text = "\n".join(render_page_verdict(verdict))
    assert verdict.limits == (UNAUDITED, UNCOMPARED)
    assert UNAUDITED in text and UNCOMPARED in text


@needs_page_watch
@pytest.mark.planted_fault(
    "a requested proof of CPU code is skipped",
    says="no trace of CPU code",
)
def test_why_a_run_has_no_proof(tmp_path: Path, fault: PlantedFault) -> None:
    run = Run(tmp_path)
    fault.check(str(why_no_page_proof(run)))
    run.host_usage_file.touch()
    assert "unites several runs" in str(why_no_page_proof(run))
    run.page_logs.mkdir()
    run.page_log_files.touch()
    assert why_no_page_proof(run) is None
    run.mark("failed", "1 test failed")
    assert "the traced run failed: 1 test failed" in str(why_no_page_proof(run))


def test_what_else_speaks_against_a_proof() -> None:
    fine = attempt(logged(0x1000))
    for changed, reason in (
        (replace(fine, tests=evidence(Outcome.FAILED)), "1 test ended with another outcome"),
        (replace(fine, incomplete=("the disk was full",)), "not complete: the disk was full"),
        (replace(fine, lost=3), "3 loads of libraries were not recorded"),
        (replace(fine, unknown=("x.so: gone",)), "the proof is not complete: x.so: gone"),
        (attempt(), "no process loaded a library with untouched pages"),
    ):
        verdict = judge_pages(changed)
        assert not verdict.proved
        assert reason in "; ".join(verdict.reasons)
