"""The verdict on CPU code, as a function of its facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.pages import HostLibrary, HostUsage, Processor
from pytest_negativa.models.spans import PAGE_SIZE, Span
from pytest_negativa.models.verdict import CpuProof, LibraryStatus, Need
from pytest_negativa.reporting.verdict import render_cpu
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.judge import TestEvidence, judge_tests, reasons_of_outcomes
from pytest_negativa.verifying.page_proof import (
    UNAUDITED,
    UNCOMPARED,
    judge_pages,
    missed_pages,
)
from pytest_negativa.verifying.supervisor import why_no_page_proof
from tests.support.faults import PlantedFault
from tests.support.paged import needs_page_watch
from tests.support.sites import verdict_of

TRACED = HostLibrary(
    sha256="a" * 64,
    size=0x20000,
    build_id=None,
    paths=("/lib/liba.so",),
    watched=(Span(0x11000, 0x19000),),
    touched=(Span(0x11000, 0x13000),),
)


def touched(*spans: tuple[int, int]) -> HostLibrary:
    return structs.replace(TRACED, touched=tuple(Span(*span) for span in spans))


def usage_of(*libraries: HostLibrary, incomplete: tuple[str, ...] = ()) -> HostUsage:
    return HostUsage(
        processors=(Processor(model="X", flags=()),),
        processes={"run": 1},
        libraries=libraries,
        incomplete=incomplete,
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


def judge(
    *found: HostLibrary,
    tests: TestEvidence | None = None,
    traced: tuple[HostLibrary, ...] = (TRACED,),
    lacks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> CpuProof:
    tests = tests or evidence()
    verdicts = judge_tests(tests)
    return judge_pages(
        usage_of(*traced, incomplete=lacks[0]),
        usage_of(*found, incomplete=lacks[1]),
        verdicts,
        reasons_of_outcomes(tests, verdicts),
        compares_ends=False,
    )


def missed(*found: HostLibrary) -> list[Need]:
    return list(missed_pages(usage_of(TRACED), usage_of(*found)))


def shown(proof: CpuProof, *needs: Need) -> str:
    return "\n".join(render_cpu(structs.replace(verdict_of(), cpu=proof, needs=needs)))


def test_pages_that_nothing_touched_are_proved() -> None:
    verdict = judge(touched((0x11000, 0x12000)))
    assert (verdict.proved, verdict.reasons) == (True, ())
    (row,) = verdict.libraries
    assert (row.code_bytes, row.unused_bytes, row.left_bytes) == (0x8000, 0x6000, 0x2000)
    assert missed(touched((0x11000, 0x12000))) == []


@pytest.mark.planted_fault(
    "a handler of SIGSEGV hides that a page of CPU code was needed",
    says="2 pages (file offsets 0x14000-0x16000) of liba.so, in the second watched run",
)
def test_a_touched_page_is_not_claimed_although_the_tests_pass(fault: PlantedFault) -> None:
    found = touched((0x11000, 0x12000), (0x14000, 0x16000))
    verdict = judge(found)
    (need,) = missed(found)
    text = shown(verdict, need)
    fault.check(text)
    (row,) = verdict.libraries
    assert need.kept and need.spans == (Span(0x14000, 0x16000),)
    assert verdict.proved and row.unused_bytes == 4 * PAGE_SIZE
    assert "no test needs 16.4 kB of CPU code" in text


@pytest.mark.planted_fault(
    "a process ran with all pages of a library",
    says="/lib/liba.so: a process could touch all of its pages",
)
def test_a_process_that_watched_nothing(fault: PlantedFault) -> None:
    unwatched = structs.replace(touched((0x14000, 0x15000)), unwatched="its code is relocated")
    fault.check("; ".join(judge(unwatched).reasons))


@pytest.mark.planted_fault(
    "no process of the proof loads a library, so no touch of it is seen",
    says="libb.so: left out: no process of the proof loaded it",
)
def test_a_library_that_the_proof_did_not_load_is_left_out(fault: PlantedFault) -> None:
    added = structs.replace(TRACED, paths=("/lib/libb.so",), sha256="b" * 64)
    verdict = judge(touched(), traced=(TRACED, added))
    assert verdict.proved
    assert [row.status for row in verdict.libraries] == [
        LibraryStatus.PROVED,
        LibraryStatus.NOT_LOADED,
    ]
    text = shown(verdict)
    assert "24.6 kB of CPU code in 1 library" in text
    fault.check(text)
    assert not judge(touched(), traced=(added,)).proved


def test_the_verdict_states_what_it_does_not_cover() -> None:
    verdict = judge(touched())
    text = shown(verdict)
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
    for verdict, reason in (
        (judge(touched(), tests=evidence(Outcome.FAILED)), "1 test ended with another outcome"),
        (judge(TRACED, lacks=(("a full disk",), ())), "the traced run is not complete: a full"),
        (judge(TRACED, lacks=((), ("x.so: gone",))), "the proof is not complete: x.so: gone"),
        (judge(), "no process loaded a library with untouched pages"),
    ):
        assert not verdict.proved
        assert reason in "; ".join(verdict.reasons)
