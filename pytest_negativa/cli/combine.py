"""``negativa combine``: several runs to one; ``--expect`` counts them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.combine import (
    RunPart,
    combine_opened,
    copy_traces,
    fetch_parts,
    healed_at,
    read_part,
    refuse_bad,
)
from pytest_negativa.cli.common import (
    EXECUTOR,
    runs_of,
    settings_of,
)
from pytest_negativa.cli.trace import PLAN_OPTIONS, plan_and_report, warn_of_hooks
from pytest_negativa.errors import StoreError
from pytest_negativa.models.settings import Settings
from pytest_negativa.pages.gather import combine as combine_pages
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.results import combine_tests
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.urls import is_url


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN|URL...")
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
    expected: int | None,
    executor: str | None,
    **flags: Any,
) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are ids or folders of traced runs, or folders with trace files: of the shards of a CI job,
    or of machines with other GPUs. A URL is where negativa push sent a run. The result is a new
    run, the same in whatever order they are given. If CPU code was traced in all of them, "negativa
    pages" shows the pages that any of them touched. If each of RUNS is proved, so is the result.

    Exit status: 0, or 1 if a run is bad, a threshold is crossed or nothing is planned because a
    run failed.
    """
    settings = settings_of(flags)
    folder = runs_of(settings)
    names = dict.fromkeys(runs)
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
        refuse_bad(parts)
        _combine(parts, folder.new_run(), settings, executor)


def _combine(
    parts: Sequence[RunPart],
    run: Run,
    settings: Settings,
    executor: str | None,
) -> None:
    """Write a new run of the parts, and report it."""
    paths = PathRules(settings.paths)
    warn_of_hooks([part.run for part in parts])
    healed = healed_at(paths, parts)
    copy_traces(parts, run, paths)
    runs = [part.run for part in parts]
    combine_pages(run, runs, paths)
    combine_opened(run, runs)
    combine_tests(run, runs)
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
