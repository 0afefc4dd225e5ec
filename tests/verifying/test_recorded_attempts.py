"""What end-to-end verifications gave ``judge`` leads to the verdicts that they got.

The nightly run verifies end to end again, and compares what it records (``.ci/nightly``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from pytest_negativa.models.trace import EAGER_LOADING, UNENDED, UsageWarning
from pytest_negativa.reporting.rows import proof_row
from pytest_negativa.verifying import judge as judging
from tests.support.attempts import read_recorded
from tests.support.faults import PlantedFault
from tests.support.witnesses import caught_faults


def test_recorded_attempts_lead_to_the_recorded_verdicts() -> None:
    recorded = read_recorded()
    assert len(recorded) > 100
    others = {
        test: [judging.judge(r.attempt).reasons for r in attempts]
        for test, attempts in recorded.items()
        if any(judging.judge(r.attempt) != r.verdict for r in attempts)
    }
    assert others == {}


def test_they_prove_and_refuse() -> None:
    verdicts = [r.verdict for attempts in read_recorded().values() for r in attempts]
    assert any(v.proved for v in verdicts) and any(not v.proved for v in verdicts)


def test_each_witness_catches_faults_by_itself() -> None:
    assert [row.witness for row in caught_faults() if not row.caught] == []


def test_a_verdict_that_proves_nothing_proves_no_files() -> None:
    name = "tests/session/test_code_files.py::test_unused_files_are_proved_locked_and_removed"
    [recorded] = read_recorded()[name]
    verdict = judging.judge(replace(recorded.attempt, problems=("a fault",)))
    for found, status in (recorded.verdict, "proved"), (verdict, "not proved"):
        assert {row.status.value for row in found.libraries} == {status}
        assert any(row.path.endswith("(files)") for row in found.libraries)
    assert proof_row(verdict).proved_bytes == 0


def test_eager_copies_of_a_lazy_trace_prove_nothing() -> None:
    name = "tests/session/test_code_files.py::test_unused_files_are_proved_locked_and_removed"
    [recorded] = read_recorded()[name]
    attempt, traced = recorded.attempt, recorded.attempt.traced
    warning = UsageWarning(code=EAGER_LOADING, text="", process=0)
    eager = structs.replace(attempt.usage, warnings=(warning,))
    [reason] = judging.judge(replace(attempt, usage=eager)).reasons
    assert "compares outcomes, and proves nothing" in reason
    # A trace that was eager, too, keeps all that fits.
    both = replace(traced, usage=structs.replace(traced.usage, warnings=(warning,)))
    assert judging.judge(replace(attempt, usage=eager, traced=both)).proved


@pytest.mark.parametrize("process", [None, 0], ids=["of any process", "of one process"])
@pytest.mark.planted_fault(
    "On the copies, CUPTI is taken in a process that asks for a function that a kept cubin lost, "
    "or tracing is off then.",
    says="functions were removed from kept cubins, and a process was not traced to its end",
)
def test_trimmed_cubins_need_the_whole_log_of_the_driver(
    process: int | None, fault: PlantedFault
) -> None:
    name = "tests/session/test_armed_trace.py::test_work_that_is_not_repeated_needs_no_rerun"
    [recorded] = read_recorded()[f"{name}[kernel-cache]"]
    attempt = recorded.attempt
    lack = UsageWarning(code="gap", text="the detector was off", process=process)
    lacking = replace(attempt, usage=structs.replace(attempt.usage, incomplete=(lack,)))
    rows = judging.judge(lacking).libraries
    fault.check(" ".join(row.detail or "" for row in rows))
    # Children need no trace by trace.children, and yet nobody knows what they asked for.
    loads = replace(attempt.loads, untraced="a child used the driver")
    assert not judging.judge(replace(attempt, loads=loads)).proved
    # Whole elements are armed. And what a process did that was killed is in its trace.
    whole = attempt.reconstruction.libraries
    made = structs.replace(
        attempt.reconstruction,
        libraries=tuple(structs.replace(copy, repacked=()) for copy in whole),
    )
    killed = structs.replace(lack, code=UNENDED)
    usage = structs.replace(attempt.usage, incomplete=(killed,))
    assert judging.judge(replace(lacking, reconstruction=made)).proved
    assert judging.judge(replace(attempt, usage=usage)).proved
