"""``negativa report`` and ``negativa pages``: reports of a traced run, limits on it."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.analysis.report import load_contents, with_limits, write_reports
from pytest_negativa.cli.common import (
    answer,
    as_json_option,
    fail_for_limits,
    say_next,
    settings_and_run,
)
from pytest_negativa.pages.functions import summarize
from pytest_negativa.pages.gather import require_usage
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.pages import render_host_report
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.options import BY_NAME

LIMITS = (
    "coverage.fail_under",
    "thresholds.max_unused_percent",
    "thresholds.min_used_kernels",
    "thresholds.max_gpu_code",
    "no_jit",
    "compare.baseline",
    "compare.fail",
)
"""The options that fail a command for what a run found."""


@click.command()
@click.argument("types", nargs=-1, metavar="[TYPE[:PATH]]...")
@click_options("run", "reports.top", *LIMITS)
def report(types: tuple[str, ...], **flags: Any) -> None:
    """Write reports of a traced run.

    Without a TYPE, the reports are those of negativa.yaml. A TYPE is:

    \b
    terminal, terminal-missing, github   printed
    json, markdown, html                 written to PATH, by default in .negativa
    lcov, cobertura                      kernel coverage, for coverage tools
    baseline                             figures to compare later runs with (--compare)

    \b
    negativa report
    negativa report markdown lcov:build/kernels.lcov
    negativa report baseline:negativa-baseline.json

    Limits are those of flags and negativa.yaml, whatever the run was made with. Exit status: 0, or
    1 if one of them is crossed, the run can't be read, or a report can't be written.
    """
    if types:
        flags[BY_NAME["reports.formats"].dest] = types
    settings, run = settings_and_run(flags)
    contents = with_limits(load_contents(run), settings)
    write_reports(contents, settings.reports, run)
    if paragraphs := tuple(render_to_screen(contents, settings.reports)):
        click.echo("\n\n".join(paragraphs))
        say_next(run)
    if settings.has_limits:
        fail_for_limits(contents.report.crossed)


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
