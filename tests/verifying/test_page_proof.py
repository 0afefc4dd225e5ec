"""The verdict on CPU code, as a function of its facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_negativa.hostcode.page_logs import PAGE, LoggedLibrary
from pytest_negativa.hostcode.usage import FilePages
from pytest_negativa.models.base import Span
from pytest_negativa.models.hostcode import HostFile, Processor
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.verifying.judge import TestEvidence
from pytest_negativa.verifying.page_proof import PageAttempt, RestrictedLibrary, judge_pages
from tests.support.faults import PlantedFault

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


def logged(*pages: int, restricted: bool = True) -> LoggedLibrary:
    return LoggedLibrary(
        path=FILE.path,
        device=1,
        inode=2,
        size=FILE.size,
        mtime_ns=3,
        watched=True,
        restricted=restricted,
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
    allowed = FilePages(frozenset(RANGES), frozenset({0x1000, 0x2000}), True)
    return PageAttempt(
        run_id="run",
        tests=evidence(),
        libraries=(RestrictedLibrary(FILE, allowed, found),),
        incomplete=(),
        lost=0,
        rounds=(),
        processor=Processor(model="X", flags=()),
    )


def test_pages_that_nothing_touched_are_proved() -> None:
    verdict = judge_pages(attempt(logged(0x1000), logged(0x1000, 0x2000)))
    assert (verdict.proved, verdict.reasons) == (True, ())
    (row,) = verdict.libraries
    assert (row.forbidden_bytes, row.processes, row.missed) == (6 * PAGE, 2, ())


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
def test_a_process_without_restriction(fault: PlantedFault) -> None:
    verdict = judge_pages(attempt(logged(0x1000), logged(0x1000, restricted=False)))
    fault.check("; ".join(verdict.reasons))


def test_what_else_speaks_against_a_proof() -> None:
    fine = attempt(logged(0x1000))
    for changed, reason in (
        (replace(fine, tests=evidence(Outcome.FAILED)), "1 test ended with another outcome"),
        (replace(fine, incomplete=("the disk was full",)), "not complete: the disk was full"),
        (replace(fine, lost=3), "3 loads of libraries were not recorded"),
        (attempt(), "no process loaded a library with untouched pages"),
    ):
        verdict = judge_pages(changed)
        assert not verdict.proved
        assert reason in "; ".join(verdict.reasons)
