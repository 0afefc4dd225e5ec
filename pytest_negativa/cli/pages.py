"""The command ``negativa pages``: what a run touched of CPU code."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.cli.common import as_json_option, encode_json, run_of, settings_of
from pytest_negativa.settings.flags import click_options


@click.command()
@as_json_option("pages")
@click_options("run", "config", "directory", "reports.top")
def pages(as_json: bool, **flags: Any) -> None:
    """Show which pages of CPU code a traced run touched, by library.

    The run must be traced with --cpu, or pytest with --negativa-cpu. Exit status: 0, or 1 without
    such a trace.
    """
    from msgspec.structs import replace

    from pytest_negativa.hostcode.gather import require_usage
    from pytest_negativa.hostcode.summary import list_variants, summarize
    from pytest_negativa.reporting.host_pages import render_host_report

    settings = settings_of(flags)
    usage = require_usage(run_of(settings))
    report = replace(summarize(usage), variants=list_variants(usage))
    if as_json:
        click.echo(encode_json(report), nl=False)
    else:
        click.echo("\n\n".join(render_host_report(report, top=settings.reports.top)))
