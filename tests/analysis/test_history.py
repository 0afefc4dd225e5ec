"""The libraries of a history: which are told apart, and which are one."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.history import history_of_runs
from pytest_negativa.errors import StoreError
from pytest_negativa.models.report import LibraryRow, ReasonRow
from pytest_negativa.reporting.history import render_history
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import load_history
from pytest_negativa.storage.runs import Run, RunsFolder
from tests.support.reports import code_files, report, row


def test_two_libraries_of_one_file_name_have_rows_of_their_own(tmp_path: Path) -> None:
    site = "/venv/lib/python3.12/site-packages"
    runs = RunsFolder(tmp_path)
    runs.make()
    for unused in (100, 150):
        run = runs.new_run()
        run.make()
        run.make_latest()
        found = report(
            sized("/x/site-packages/a/_C.so", 1000, 100),
            sized(f"{site}/b/_C.so", 500, unused),
            # One distribution in two sites.
            sized("/other/site-packages/b/_C.so", 30, 30),
            code_files(path=f"{site}/some-kernels (files)", version="1.0"),
            code_files(path="/other/site-packages/some-kernels (files)", version="2.0"),
        )
        write_record(run.report_file, replace(found, run_id=run.run_id))
        plan(run)

    first, second = history_of_runs(runs)

    assert [
        (one.name, one.code_bytes, one.unused_bytes, one.version) for one in first.libraries
    ] == [
        ("a/_C.so", 1000, 100, None),
        ("b/_C.so", 530, 130, None),
        ("some-kernels (files)", 2000, 800, "1.0, 2.0"),
    ]
    assert [one.unused_bytes for one in second.libraries] == [100, 180, 800]
    [table] = render_history((first, second), "_C.so")
    changes = [line.split()[6:9] for line in table.splitlines()[2:]]
    assert changes[2:] == [["0", "B,", "+0.0%"], ["0", "B,", "+0.0%"]]


def test_a_report_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path)
    for text in ("{}", None, ""):
        run = runs.new_run()
        run.make()
        run.make_latest()
        if text is not None:
            run.report_file.write_text(text)
    with pytest.raises(StoreError, match=r"no run has figures: .*json"):
        history_of_runs(runs)
    write_record(run.report_file, report(sized("/x/l.so", 10, 0)))
    plan(run)
    damaged, good = history_of_runs(runs)
    assert damaged.problem is not None and "report.json" in damaged.problem
    assert good.problem is None


def plan(run: Run) -> None:
    """Make a run one that has a plan. Histories don't read it."""
    run.plan_dir.mkdir()
    (run.plan_dir / "l.so.json").write_text("{}")


def test_runs_without_a_plan_are_left_out(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path)
    runs.make()
    for failure in (None, "1 test failed", None):
        run = runs.new_run()
        run.make()
        run.make_latest()
        found = report(sized("/x/l.so", 10, 5))
        write_record(run.report_file, replace(found, run_id=run.run_id))
        if failure is None:
            plan(run)
        else:
            run.mark_failed(failure)
    first, failed, last = history_of_runs(runs)
    assert (failed.libraries, failed.problem) == ((), "nothing is planned from it: 1 test failed")
    assert [one.run_id for one in load_history(run)] == [first.title, last.title]


def sized(path: str, code: int, unused: int) -> LibraryRow:
    """A library with bytes of GPU code."""
    reasons = (ReasonRow(reason="wrong-arch", elements=1, bytes=unused),)
    return row(path=path, code_bytes=code, unused=reasons)
