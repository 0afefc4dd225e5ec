"""The command that traces a program and plans the run: debloat."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.cli.common import (
    COMMAND,
    EXECUTOR,
    PASS_ON,
    settings_of,
)
from pytest_negativa.cli.plan_run import PLAN_OPTIONS, plan_and_report
from pytest_negativa.cli.program import exit_untraced, trace_command, why_failed
from pytest_negativa.errors import NegativaError
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options


@click.command(context_settings=PASS_ON)
@COMMAND
@EXECUTOR
@click_options(*PLAN_OPTIONS)
def debloat(command: tuple[str, ...], executor: str | None, **flags: Any) -> None:
    """Trace COMMAND, report its unused GPU code; slim removes it.

    The same as trace and locate: libraries stay as they are. Exit status: that of COMMAND; if that
    is 0, that of locate. 127 if there is no such command.
    """
    settings = settings_of(flags)
    run, status = trace_command(command, settings)
    if not run.trace_files():
        exit_untraced(run, status, settings)
    failure = why_failed(status)
    try:
        plan_and_report(run.trace_files(), run, settings, executor, failure=failure, status=status)
    except NegativaError as e:
        if status == 0:
            raise
        print_error(e)
    click.get_current_context().exit(status)
