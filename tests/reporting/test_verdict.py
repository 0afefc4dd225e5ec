"""What a verdict says of what is left."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.verdict import (
    LibraryStatus,
    Need,
    ProvedLibrary,
    TestVerdict,
    Verdict,
    Witness,
)
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.reporting.verdict import render_verdict
from pytest_negativa.verifying.used_originals import judge_files
from tests.support.code_files import planned_files
from tests.support.defaults import DEFAULTS


def proved(left: int) -> Verdict:
    """10 MB of code, of which 1 MB is in elements that stay."""
    library = ProvedLibrary(
        path="/lib/libx.so",
        soname=None,
        build_id=None,
        size=20_000_000,
        sha256=None,
        copy_sha256=None,
        status=LibraryStatus.PROVED,
        detail=None,
        code_bytes=10_000_000,
        unused_bytes=9_000_000,
        elements=10,
        unused_elements=9,
        trimmed_code_bytes=0,
        left_bytes=left,
        processes=1,
        spans=(),
    )
    return Verdict(
        run_id="run",
        proved=True,
        reasons=(),
        command=("pytest",),
        exit_status=0,
        fill=1,
        granularity="element",
        gpu_tests=1,
        created_ns=0,
        devices=(),
        versions={},
        libraries=(library,),
        tests=(),
        rounds=(),
    )


@pytest.mark.parametrize(("left", "text"), [(1_000_000, "1.0 MB (10.0%)"), (0, "0 B (0.0%)")])
def test_what_is_left(left: int, text: str) -> None:
    shown = "\n".join(render_verdict(proved(left), DEFAULTS.reports))
    assert f"{text} is left." in shown.splitlines()


def test_the_witnesses_of_a_proof() -> None:
    verdict = proved(0)
    [library] = verdict.libraries
    shown = "\n".join(render_verdict(verdict, DEFAULTS.reports))
    assert "  touches: no removed code was watched" in shown and "0.0% (0/9)" in shown
    row = replace(library, watched_bytes=8_100_000, watched_elements=6, notes=("noted",))
    work = Need(witness=Witness.NOT_REPEATED, test="t")
    flaky = TestVerdict(nodeid="t", before=Outcome.PASSED, after=Outcome.FAILED, flaky=True)
    verdict = replace(verdict, libraries=(row,), needs=(work,), tests=(flaky,))
    *_, witnesses, conclusion = render_verdict(verdict, DEFAULTS.reports)
    assert witnesses.splitlines()[:-1] == [
        "Witnesses:",
        "  the driver's word: it refused nothing on the copies alone",
        "  touches: none of the 8.1 MB (90.0%) that was watched, in 6 of 9 elements",
        "  the same work: what the traced run used was used on the copies, or stays whole",
        "  outcomes: all as in the traced run, but for flaky tests",
        "  nobody else: no process was seen on an original, but for what is noted",
    ]
    assert witnesses.splitlines()[-1].startswith("  not seen: ")
    assert conclusion.startswith("PROVED: ")
    assert "90.0% (6/9)" in "\n".join(render_verdict(verdict, DEFAULTS.reports))
    refused = replace(verdict, proved=False, reasons=("a test differs",))
    assert not any("Witnesses:" in one for one in render_verdict(refused, DEFAULTS.reports))


def test_a_distribution_without_unused_files_has_no_line() -> None:
    plans = [
        planned_files({"k/a.cubin": 300}, {}).plan,
        planned_files({}, {"k/b.cubin": 300}, distribution="others").plan,
    ]
    installed = {(plan.library.path, str(plan.library.sha256)) for plan in plans}
    opens = Opens({"/site/k/a.cubin": 1})
    verdict = proved(0)
    files = tuple(judge_files(plans, [opens], installed))
    verdict = replace(verdict, libraries=(*verdict.libraries, *files))

    shown = "\n".join(render_verdict(verdict, DEFAULTS.reports))

    name = "some-kernels (files)"
    assert f"{name}: opened while the tests ran on the copies, so kept: k/a.cubin" in shown
    assert "others" not in shown


def test_what_several_libraries_share_is_said_once() -> None:
    verdict = proved(0)
    [library] = verdict.libraries
    held = "process 5 (server) had the original open"
    rows = [replace(library, path=f"/lib/lib{name}.so", notes=(held,)) for name in "abcd"]
    other = replace(library, path="/lib/e.so", detail="a test copied it")

    shown = "\n".join(render_verdict(replace(verdict, libraries=(*rows, other)), DEFAULTS.reports))

    assert [line for line in shown.splitlines() if "process 5" in line] == [
        f"liba.so, libb.so, libc.so and 1 more: {held}"
    ]
    assert "\ne.so: a test copied it\n" in shown
