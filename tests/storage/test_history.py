"""The reports of earlier runs, for the chart of the HTML report."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import load_history
from pytest_negativa.storage.runs import RunsFolder
from tests.support.reports import report, row


def test_runs_without_a_plan_or_a_sound_report_are_left_out(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path)
    runs.make()
    ids = []
    for fault in ("", "1 test failed", "damaged", ""):
        run = runs.new_run()
        run.make()
        run.make_latest()
        ids.append(run.run_id)
        write_record(run.report_file, replace(report(row()), run_id=run.run_id))
        if fault == "1 test failed":
            run.mark("failed", fault)
            continue
        run.plan_dir.mkdir()
        (run.plan_dir / "l.so.json").write_text("{}")
        if fault == "damaged":
            run.report_file.write_text("{}")
    assert [one.run_id for one in load_history(run)] == [ids[0], ids[3]]
