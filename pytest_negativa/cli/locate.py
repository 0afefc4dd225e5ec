"""The command that plans a traced run: locate."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from pytest_negativa.cli.common import (
    EXECUTOR,
    as_json_option,
    run_of,
    settings_of,
    warn_of_hooks,
)
from pytest_negativa.cli.plan_run import PLAN_OPTIONS, plan_and_report
from pytest_negativa.models.settings import Report, ReportFormat, Settings
from pytest_negativa.settings.flags import click_options


@click.command()
@as_json_option("report")
@EXECUTOR
@click_options("run", *PLAN_OPTIONS)
def locate(as_json: bool, executor: str | None, **flags: Any) -> None:
    """Find the unused GPU code of a traced run.

    Plans and spans go to the run's folder, and the run becomes the last one. No hook of a
    conftest.py or plugin is called. Exit status: 0, or 1 if a threshold is crossed or nothing is
    planned because the run failed.
    """
    settings = settings_of(flags)
    if as_json:
        settings = _with_json(settings)
    run = run_of(settings)
    traces = run.require_traces()
    warn_of_hooks([run])
    plan_and_report(traces, run, settings, executor, failure=run.failure)


def _with_json(settings: Settings) -> Settings:
    """The same, with JSON on standard output in the place of what is printed."""
    files = tuple(wanted for wanted in settings.reports.formats if wanted.path is not None)
    formats = (*files, Report(format=ReportFormat.JSON, path="-"))
    return replace(settings, reports=replace(settings.reports, formats=formats))
