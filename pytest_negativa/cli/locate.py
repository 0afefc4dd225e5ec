"""The command that plans a traced run: locate."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.cli.common import (
    EXECUTOR,
    run_of,
    settings_of,
)
from pytest_negativa.cli.plan_run import PLAN_OPTIONS, plan_and_report, warn_of_hooks
from pytest_negativa.settings.flags import click_options


@click.command()
@EXECUTOR
@click_options("run", *PLAN_OPTIONS)
def locate(executor: str | None, **flags: Any) -> None:
    """Find the unused GPU code of a traced run.

    Plans and spans go to the run's folder, and the run becomes the last one. No hook of a
    conftest.py or plugin is called. --report json:- prints JSON.

    Exit status: 0, or 1 if a threshold is crossed or nothing is planned because the run failed.
    """
    settings = settings_of(flags)
    run = run_of(settings)
    traces = run.require_traces()
    warn_of_hooks([run])
    plan_and_report(traces, run, settings, executor, failure=run.failure)
