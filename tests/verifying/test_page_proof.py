"""The verdict on CPU code, as a function of its facts."""

from __future__ import annotations

import pytest
from msgspec import structs

from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.spans import PAGE_SIZE, Span
from pytest_negativa.models.verdict import LibraryStatus, ProvedLibrary, Verdict
from pytest_negativa.reporting.verdict import render_cpu
from pytest_negativa.verifying.judge import TestEvidence, judge_tests, reasons_of_outcomes
from pytest_negativa.verifying.page_proof import judge_pages
from tests.support.faults import PlantedFault
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
        processors=("X",),
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
    gpu: Verdict | None = None,
) -> Verdict:
    tests = tests or evidence()
    return judge_pages(
        gpu or verdict_of(),
        usage_of(*traced, incomplete=lacks[0]),
        usage_of(*found, incomplete=lacks[1]),
        tuple(reasons_of_outcomes(tests, judge_tests(tests))),
    )


def shown(verdict: Verdict) -> str:
    return "\n".join(render_cpu(verdict))


def test_pages_that_nothing_touched_are_proved() -> None:
    verdict = judge(touched((0x11000, 0x12000)))
    assert (verdict.proved, verdict.reasons, verdict.cpu_reasons) == (True, (), ())
    (row,) = verdict.libraries
    assert (row.pages, row.status) == ("19-24", LibraryStatus.NOTHING_UNUSED)
    assert verdict.needs == () and not verdict.gpu_libraries
    assert "Proved on X: no test needs 24.6 kB of CPU code in 1 library." in shown(verdict)


def test_a_library_with_gpu_code_has_one_row() -> None:
    known = ProvedLibrary(
        path="/b/liba.so", soname="liba.so", build_id=None, size=TRACED.size, sha256=TRACED.sha256,
        status=LibraryStatus.NOT_PROVED, elements=2,
    )  # fmt: skip
    other = structs.replace(known, path="/b/libb.so", sha256="b" * 64)
    gpu = structs.replace(
        verdict_of(), proved=False, reasons=("a kernel is needed",), libraries=(known, other)
    )
    both = structs.replace(TRACED, paths=("/b/liba.so", "/lib/liba.so"))
    verdict = judge(both, traced=(both,), gpu=gpu)
    assert verdict.libraries == (structs.replace(known, pages="19-24"), other)
    # Each keeps its reasons.
    assert (verdict.reasons, verdict.cpu_reasons) == (gpu.reasons, ())
    # Another file at the same path is another library.
    changed = structs.replace(both, sha256="c" * 64)
    verdict = judge(changed, traced=(changed,), gpu=gpu)
    assert [(row.sha256[:1], row.pages) for row in verdict.libraries if row.sha256] == [
        ("a", None), ("b", None), ("c", "19-24"),
    ]  # fmt: skip


@pytest.mark.planted_fault(
    "a handler of SIGSEGV hides that a page of CPU code was needed",
    says="2 pages (file offsets 0x14000-0x16000) of liba.so, in the second watched run",
)
def test_a_touched_page_is_not_claimed_although_the_tests_pass(fault: PlantedFault) -> None:
    verdict = judge(touched((0x11000, 0x12000), (0x14000, 0x16000)))
    text = shown(verdict)
    fault.check(text)
    (need,), (row,) = verdict.needs, verdict.libraries
    assert need.kept and need.spans == (Span(0x14000, 0x16000),)
    assert verdict.proved and row.pages == "19 22-24"
    assert f"no test needs {4 * PAGE_SIZE / 1000:.1f} kB of CPU code" in text


@pytest.mark.planted_fault(
    "a process ran with all pages of a library",
    says="Left out: not loaded, or not watched, by both runs: liba.so",
)
def test_a_process_that_watched_nothing(fault: PlantedFault) -> None:
    unwatched = structs.replace(touched((0x14000, 0x15000)), unwatched="its code is relocated")
    verdict = judge(unwatched)
    fault.check(shown(verdict))
    assert [row.pages for row in verdict.libraries] == [None] and not verdict.proved


@pytest.mark.planted_fault(
    "no process of the proof loads a library, so no touch of it is seen",
    says="Left out: not loaded, or not watched, by both runs: libb.so",
)
def test_a_library_that_the_proof_did_not_load_is_left_out(fault: PlantedFault) -> None:
    added = structs.replace(TRACED, paths=("/lib/libb.so",), sha256="b" * 64)
    verdict = judge(touched(), traced=(TRACED, added))
    assert verdict.proved
    assert [row.pages for row in verdict.libraries] == ["19-24", None]
    text = shown(verdict)
    assert "24.6 kB of CPU code in 1 library" in text
    fault.check(text)
    assert not judge(touched(), traced=(added,)).proved


def test_what_else_speaks_against_a_proof() -> None:
    for verdict, reason in (
        (judge(touched(), tests=evidence(Outcome.FAILED)), "1 test ended with another outcome"),
        (judge(TRACED, lacks=(("a full disk",), ())), "a full disk"),
        (judge(TRACED, lacks=((), ("x.so: gone",))), "x.so: gone"),
        (judge(), "no process loaded a library with untouched pages"),
    ):
        assert not verdict.proved and verdict.reasons == verdict.cpu_reasons
        assert reason in "; ".join(verdict.reasons)
        assert reason in shown(verdict)
