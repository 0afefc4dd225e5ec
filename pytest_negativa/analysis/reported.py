"""Reports of runs that exist: a run's folder to what its report shows."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_negativa.analysis.finish import path_for_people
from pytest_negativa.analysis.report import rows_of
from pytest_negativa.errors import StoreError
from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.storage.results import load_planned, load_report, load_usage
from pytest_negativa.storage.runs import Run


def load_contents(run: Run) -> ReportContents:
    """What the reports of a run show. Rows are of the plans, which healing may have changed.

    Raises:
        StoreError: the run isn't located yet, or one of its files can't be read.
    """
    report = load_report(run)
    report = replace(report, directory=path_for_people(run.folder))
    if (usage := load_usage(run)) is None:
        raise StoreError(f"{run.usage_file}: not found; make it with {run.locate_command}")
    if (reason := run.incomplete_reason) is not None:
        text = f"this run's plans may lack code that was used after the report: {reason}"
        return ReportContents(replace(report, warnings=(*report.warnings, text)), (), usage)
    if not run.plan_files():
        return ReportContents(report, (), usage)
    planned = load_planned(run)
    return ReportContents(replace(report, libraries=rows_of(planned)), planned, usage)
