"""``negativa diff``: what changed between releases, runs or baselines."""

from __future__ import annotations

import shlex
from typing import Any

import click

from pytest_negativa.analysis.difference import load_side
from pytest_negativa.cli.common import answer, as_json_option, check_usage, runs_of, settings_of
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.models.difference import Difference, Side
from pytest_negativa.planning.difference import compare
from pytest_negativa.reporting.difference import render_difference
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.results import load_history


@click.command()
@click.argument("before", metavar="[A", required=False)
@click.argument("after", metavar="B]", required=False)
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@as_json_option("difference")
@click_options("reports.top")
def diff(
    before: str | None,
    after: str | None,
    headers_only: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what changed in the GPU code from A to B.

    Without B, it is the last run. Without A, A is the run before it. Runs without a plan
    don't count. A and B are runs (an id or a folder), baselines, libraries,
    folders of libraries, wheels and other archives, or installed distributions. Libraries are
    paired by the ends of their paths. The tables show what grew: by library and arch, between
    runs by reason. The lists show kernels that appeared, went, or are newly used or unused.
    A run lists the kernels of the project's own libraries and those that it used.
    A slimmed library has the code that is left in the file; code in a spare counts as gone.

    Exit status: 0, or 1 if A or B, or a library in them, can't be read.
    """
    settings = settings_of(flags)
    runs, cache = runs_of(settings), open_cache(settings.cache_dir)
    if before is None or after is None:
        # A named run, or the last but one with a plan; and the last.
        planned = [report.run_id for report in load_history(runs.find())]
        names = (*([before] if before else planned[-2:-1]), *planned[-1:])
        check_usage((len(names) < 2, "name A and B: no two saved runs have a plan"))
        before, after = names

    def load(argument: str) -> Side:
        with Progress(f"reading {argument}") as progress:
            return load_side(
                argument, runs, headers_only=headers_only, cache=cache, on_done=progress.update
            )

    new, old = load(after), load(before)
    difference = Difference(
        before=old.title, after=new.title, libraries=compare(old.libraries, new.libraries)
    )
    is_planned = any(one.reasons is not None for one in new.libraries)
    look = "pytest --negativa --negativa-compare=" if is_planned else "negativa inspect "
    answer(
        difference,
        render_difference(difference, settings.reports.top),
        as_json=as_json,
        then=look + shlex.quote(after),
        errors=(*new.unread, *old.unread),
    )
