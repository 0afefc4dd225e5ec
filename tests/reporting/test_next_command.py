"""The next command, from the state of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from pytest_negativa.models.verdict import LibraryStatus
from pytest_negativa.reporting.next_command import next_line
from pytest_negativa.storage.outcomes import CommandOutcome
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run
from tests.support.reports import report
from tests.support.sites import verdict_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    write_record(run.report_file, report())
    (run.plan_dir).mkdir()
    (run.plan_dir / "0.json").touch()
    CommandOutcome(run.outcomes_file, ("./program",)).finish(0, 1.0, traced=0, silent=False)
    return run


def test_from_trace_to_lock(run: Run) -> None:
    assert next_line(run) == "Next: negativa verify"
    verdict = verdict_of(status=LibraryStatus.NOT_PROVED)
    write_record(run.verdict_file, verdict)
    assert next_line(run) == "Next: negativa verify --heal"
    write_record(run.verdict_file, msgspec.structs.replace(verdict, healing=True))
    assert next_line(run) == "Next: negativa trace -- COMMAND"
    write_record(run.verdict_file, verdict_of())
    assert next_line(run) == "Next: negativa lock"


def test_a_combined_run_can_not_be_verified(run: Run) -> None:
    run.outcomes_file.unlink()
    way = "Next: pytest --negativa-verify for each run that is not proved, then negativa combine"
    assert next_line(run) == way
    write_record(run.verdict_file, verdict_of())
    assert next_line(run) == "Next: negativa lock"


@pytest.mark.parametrize(
    ("proved", "command"),
    [
        (None, "verify --cpu"),
        (False, "trace --cpu -- COMMAND"),
        (True, "lock"),
    ],
)
def test_only_cpu_code_was_traced(run: Run, proved: bool | None, command: str) -> None:
    run.host_usage_file.touch()
    if proved is not None:
        write_record(run.verdict_file, msgspec.structs.replace(verdict_of(), proved=proved))
    assert next_line(run).startswith(f"Next: negativa {command}")


def test_without_a_plan(run: Run) -> None:
    shutil.rmtree(run.plan_dir)
    assert next_line(run) == "Next: negativa inspect"
    run.mark("failed", "it ended with exit status 3")
    assert next_line(run) == "Next: negativa trace -- COMMAND"


def test_a_replay_leads_to_no_lock_that_could_take_the_place_of_a_proved_one(run: Run) -> None:
    write_record(run.report_file, report(replay="No GPU: replaying."))
    assert next_line(run) == "Next: negativa trace -- COMMAND on a machine with a GPU"
