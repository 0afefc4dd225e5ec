"""Reports of runs that exist: a run's folder to what its report shows."""

from __future__ import annotations

import dataclasses
import sys

from msgspec.structs import replace

from pytest_negativa.analysis.baseline import names_of
from pytest_negativa.analysis.finish import write_reports
from pytest_negativa.analysis.report import check_limits, rows_of, with_owner
from pytest_negativa.errors import StoreError
from pytest_negativa.installed.sites import Places
from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.settings import Settings, SourceKind
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.rows import proof_row
from pytest_negativa.reporting.text import path_for_people
from pytest_negativa.settings.globs import limit_of
from pytest_negativa.storage.results import load_planned, load_report, load_usage, load_verdict
from pytest_negativa.storage.runs import Run

_NO_PLAN = "the limits can't be checked: this run has no plan"


def load_contents(run: Run) -> ReportContents:
    """What the reports of a run show. Rows are of the plans, which healing may have changed.

    Raises:
        StoreError: the run isn't located yet, has no trace of GPU code, or one of its files can't
            be read.
    """
    run.require_gpu_trace()
    report = load_report(run)
    verdict = load_verdict(run)
    report = replace(
        report,
        directory=path_for_people(run.folder),
        proof=None if verdict is None else proof_row(verdict),
    )
    if (usage := load_usage(run)) is None:
        raise StoreError(f"{run.usage_file}: not found; make it with {run.locate_command}")
    if (reason := run.incomplete_reason) is not None:
        text = f"this run's plans may lack code that was used after the report: {reason}"
        return ReportContents(replace(report, warnings=(*report.warnings, text)), (), usage)
    if not run.plan_files():
        return ReportContents(report, (), usage)
    covered = {one.path: one for one in report.coverage}
    planned = tuple(
        dataclasses.replace(one, coverage=covered.get(one.plan.library.path))
        for one in load_planned(run)
    )
    known = {row.path: row for row in report.libraries}
    rows = tuple(with_owner(row, known.get(row.path, row)) for row in rows_of(planned))
    return ReportContents(replace(report, libraries=rows), planned, usage)


def with_limits(contents: ReportContents, settings: Settings) -> ReportContents:
    """The same, with the limits of these settings in the place of those that the run was made with.

    Without any limit, the crossed limits stay as the run has them. Without a plan, the run crosses
    each limit, for nothing can be compared with it.
    """
    if not settings.has_limits:
        return contents
    if contents.report.libraries and not contents.libraries:
        crossed = (*contents.report.crossed, _NO_PLAN)
        return dataclasses.replace(contents, report=replace(contents.report, crossed=crossed))
    places = Places()
    libraries = []
    for one in contents.libraries:
        named = dataclasses.replace(one, distribution=places.of(one.plan.library.path).distribution)
        limit = limit_of(settings.coverage.fail_under.libraries, names_of(named))
        covered = None if one.coverage is None else replace(one.coverage, limit=limit)
        if limit is not None and covered is None:
            raise StoreError(
                f"coverage.fail_under: the run has no coverage of "
                f"{one.plan.library.path}; plan it again with negativa locate"
            )
        libraries.append(dataclasses.replace(named, coverage=covered))
    report = contents.report
    checked = check_limits(settings, contents.usage, libraries, unchecked=report.unchecked)
    warnings = tuple(text for text in report.warnings if text not in checked.crossed)
    report = replace(report, crossed=checked.crossed, compared=checked.lines, warnings=warnings)
    return dataclasses.replace(contents, report=report)


def crossed_limits(run: Run, settings: Settings) -> tuple[str, ...]:
    """The limits of the settings that a planned run crosses, a sentence each.

    Raises:
        StoreError: the run can't be read.
    """
    return with_limits(load_contents(run), settings).report.crossed if settings.has_limits else ()


def report_verified(run: Run, settings: Settings) -> None:
    """Make the reports of a run that was verified, with the verdict.

    A report goes to the screen only if a flag asks for it. A session that traced the run has
    printed it before.

    Raises:
        StoreError: the run can't be read, or a report can't be written.
    """
    options = settings.reports
    is_asked = settings.sources["reports.formats"].kind is SourceKind.FLAG
    prints = is_asked and not settings.enabled
    if not run.report_file.exists() or not (prints or any(w.path for w in options.formats)):
        return
    contents = with_limits(load_contents(run), settings)
    write_reports(contents, options, run)
    if prints:
        for paragraph in render_to_screen(contents, options):
            sys.stdout.write(f"{paragraph}\n\n")
        sys.stdout.flush()
