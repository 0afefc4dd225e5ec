"""The command ``negativa pages``: what a run touched of CPU code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from msgspec.structs import replace

from pytest_negativa.cli.common import (
    answer,
    as_json_option,
    run_of,
    runs_of,
    settings_of,
    show,
)
from pytest_negativa.hostcode.gather import require_usage
from pytest_negativa.hostcode.summary import list_variants, summarize, touched_functions
from pytest_negativa.models.hostcode import HostUsage
from pytest_negativa.planning.by_tests import compare_groups
from pytest_negativa.reporting.host_pages import render_host_report
from pytest_negativa.reporting.launches import similarity_table
from pytest_negativa.settings.flags import click_options


@click.command()
@click.option(
    "--similar",
    "others",
    metavar="RUN",
    multiple=True,
    help="Compare the touched functions with those of this run.",
)
@as_json_option("pages")
@click_options("run", "reports.top")
def pages(others: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Show which pages of CPU code a traced run touched, by library.

    The run must be traced with --cpu, or pytest with --negativa-cpu. --similar prints the Jaccard
    similarity of each two runs: 1.00 if they touched the pages of the same functions, 0.00 for none
    in common. RUN is an id that runs list prints, or a folder.

    Exit status: 0, or 1 without such a trace.
    """
    settings = settings_of(flags)
    run = run_of(settings)
    usage = require_usage(run)
    if others:
        named = [run, *(runs_of(settings).find(other) for other in others)]
        if len({one.run_id for one in named}) < len(named):
            raise click.BadParameter("name another run than the one shown", param_hint="--similar")
        show(_compare({one.run_id: require_usage(one) for one in named}))
        return
    report = replace(summarize(usage), variants=list_variants(usage))
    answer(report, render_host_report(report, top=settings.reports.top), as_json=as_json, then=run)


def _compare(usages: Mapping[str, HostUsage]) -> str:
    """A table of each two runs and how alike the functions are that they touched."""
    touched = {name: set(touched_functions(usage)) for name, usage in usages.items()}
    return similarity_table("run", compare_groups(touched))
