"""The command ``negativa pages``: what a run touched of CPU code."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.cli.common import answer, as_json_option, settings_and_run
from pytest_negativa.hostcode.gather import require_usage
from pytest_negativa.hostcode.summary import summarize
from pytest_negativa.reporting.host_pages import render_host_report
from pytest_negativa.settings.flags import click_options


@click.command()
@as_json_option("pages")
@click_options("run", "reports.top")
def pages(as_json: bool, **flags: Any) -> None:
    """Show which pages of CPU code a traced run touched, by library.

    The run must be traced with --cpu, or pytest with --negativa-cpu.

    Exit status: 0, or 1 without such a trace.
    """
    settings, run = settings_and_run(flags)
    report = summarize(require_usage(run))
    answer(report, render_host_report(report, top=settings.reports.top), as_json=as_json, then=run)
