"""``negativa combine``: several runs to one; parts that are left out; ``--expect`` counts them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.combine import (
    RunPart,
    choose_parts,
    combine_opened,
    copy_traces,
    fetch_parts,
    healed_at,
    read_part,
    why_partial,
)
from pytest_negativa.cli.common import (
    EXECUTOR,
    check_usage,
    runs_of,
    settings_of,
)
from pytest_negativa.cli.locate import PLAN_OPTIONS, plan_and_report, warn_of_hooks
from pytest_negativa.errors import StoreError
from pytest_negativa.models.settings import Settings
from pytest_negativa.pages.gather import combine as combine_pages
from pytest_negativa.reporting.text import print_warning, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.results import combine_tests
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.urls import is_url


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN|URL...")
@click.option(
    "--leave-out-bad",
    is_flag=True,
    help="Leave out bad and failed runs; fail only if all are.",
)
@click.option(
    "--expect",
    "expected",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="Fail unless there are so many runs: a shard that never started.",
)
@EXECUTOR
@click_options("paths", *PLAN_OPTIONS)
def combine(
    runs: tuple[str, ...],
    leave_out_bad: bool,
    expected: int | None,
    executor: str | None,
    **flags: Any,
) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are ids or folders of traced runs, or folders with trace files: of the shards of a CI job,
    or of machines with other GPUs. A URL is where negativa push sent a run. The result is a new
    run, the same in whatever order they are given. If CPU code was traced in all of them, "negativa
    pages" shows the pages that any of them touched. If each of RUNS is proved, so is the result.

    A result that lacks a bad run can't be locked. Exit status: 0, or 1 if a run is bad, a threshold
    is crossed or nothing is planned because a run failed.
    """
    settings = settings_of(flags)
    folder = runs_of(settings)
    names = dict.fromkeys(runs)
    check_usage((not names, "name the runs to combine"))
    with contextlib.ExitStack() as stack:
        fetched: dict[str, Run | StoreError] = {}
        if any(map(is_url, names)):
            folder.make()
            temporary = tempfile.TemporaryDirectory(dir=folder.folder, prefix=".fetched-")
            fetched = fetch_parts(names, Path(stack.enter_context(temporary)))
        parts = [read_part(name, folder, fetched.get(name)) for name in names]
        # A run may be here twice, as a copy.
        count = len(
            {
                tuple((path.name, path.stat().st_size) for path in part.traces)
                or part.run.folder.resolve()
                for part in parts
            }
        )
        if expected not in (None, count):
            runs_are = format_items(count, "run is", "runs are")
            raise StoreError(f"{runs_are} here, expected {expected}; name the run of each shard")
        parts, left_out = choose_parts(parts, leave_out_bad=leave_out_bad)
        _combine(parts, left_out, folder.new_run(), settings, executor)


def _combine(
    parts: Sequence[RunPart],
    left_out: Sequence[str],
    run: Run,
    settings: Settings,
    executor: str | None,
) -> None:
    """Write a new run of parts, and report it."""
    paths = PathRules(settings.paths)
    for line in left_out:
        print_warning(f"{line}: left out")
    warn_of_hooks([part.run for part in parts])
    healed = healed_at(paths, parts)
    copy_traces(parts, run, paths)
    runs = [part.run for part in parts]
    combine_pages(run, runs, paths)
    combine_opened(run, runs)
    combine_tests(run, runs)
    run.mark("partial", why_partial(parts, left_out))
    if not any(part.traces for part in parts):
        run.make_latest()
        click.echo(
            printable(f"CPU code that any of them touched: {run}; show it with: negativa pages")
        )
        return
    failed = [f"{part.name}: {part.failure}" for part in parts if part.failure is not None]
    plan_and_report(
        run.trace_files(),
        run,
        settings,
        executor,
        failure="; ".join(failed) or None,
        healed=healed,
        parts=runs,
    )
