"""Processes of a session that could use the GPU and have no trace: everything is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.verified import VerifiedProject

SUITE = """
@pytest.mark.parametrize("number", range(8))
def test_use(number):
    use(LIB, number % 3)
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A tool holds CUPTI in one pytest-xdist worker, whose trace lists no library",
    says="worker gw0 was not traced: CUPTI serves one tool at a time and is taken",
)
@pytest.mark.parametrize("taken", ["gw0", "none,gw0"])
def test_a_worker_in_which_cupti_was_taken(tmp_path: Path, taken: str, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    fault.check(project.pytest("-q", "--negativa", "-n2", STANDIN_TAKEN=taken).stdout)
    assert {d[3] for d in project.plan("lib.so")} == {"incomplete"}


@pytest.mark.slow
def test_a_session_in_which_cupti_was_taken(tmp_path: Path) -> None:
    """It says so, and so does who asks for its proof."""
    project = VerifiedProject(tmp_path / "project", SUITE)
    reason = "CUPTI serves one tool at a time and is taken"
    done = project.pytest("-q", "--negativa", STANDIN_TAKEN="none")
    assert "Not covered by the trace" in done.stdout and reason in done.stdout
    for asked in (
        project.verify(status=1),
        project.negativa("verify", status=1).stderr,
        project.negativa("verify", "--heal", status=1).stderr,
    ):
        assert "not verified: this session was not traced: " in asked and reason in asked


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The limit of file sizes cuts the trace of the test process in the middle of the session",
    says="a record could not be written: is the disk full, or a quota reached?",
)
def test_a_trace_that_is_cut(tmp_path: Path, fault: PlantedFault) -> None:
    limited = """
import resource

def test_limited():
    use(LIB, 0)
    [trace] = Path(".negativa").glob("*/trace/*.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trace.stat().st_size + 100, before[1]))
    use(LIB, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    use(LIB, 2)
"""
    project = VerifiedProject(tmp_path / "project", limited)
    fault.check(project.pytest("-q", "--negativa").stdout)
    assert {d[3] for d in project.plan("lib.so")} == {"incomplete"}
