"""The commands that plan runs: locate, combine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from pytest_negativa.analysis.combine import (
    Part,
    choose_parts,
    combine_opened,
    copy_traces,
    fetch_parts,
    healed_at,
    read_part,
    why_partial,
)
from pytest_negativa.analysis.report import plan_run
from pytest_negativa.cli.common import (
    EXECUTOR,
    fail_for_limits,
    say_next,
    settings_and_run,
    settings_of,
    workers_for,
)
from pytest_negativa.errors import StoreError
from pytest_negativa.hostcode.gather import combine as combine_pages
from pytest_negativa.hostcode.gpu_pages import with_pages, with_pages_of
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.settings import FailureMode, Settings
from pytest_negativa.models.trace import UNENDED
from pytest_negativa.models.verdict import NeededSpan
from pytest_negativa.planning.keep_needed import of_each_path
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_warning, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.results import combine_tests, load_plans, save_healed
from pytest_negativa.storage.runs import Run, RunsFolder, is_run_id
from pytest_negativa.storage.urls import is_url
from pytest_negativa.tracing.merge import merge_when_ended

PLAN_OPTIONS = (
    "libraries.include",
    "libraries.exclude",
    "keep.kernels",
    "keep.libraries",
    "keep.archs",
    "keep.ptx",
    "granularity",
    "reports.formats",
)


@click.command()
@EXECUTOR
@click_options("run", *PLAN_OPTIONS)
def locate(executor: str | None, **flags: Any) -> None:
    """Find the unused GPU code of a traced run.

    Plans and spans go to the run's folder, and the run becomes the last one. No hook of a
    conftest.py or plugin is called. --report json:- prints JSON.

    Exit status: 0, or 1 if a threshold is crossed or nothing is planned because the run failed.
    """
    settings, run = settings_and_run(flags)
    traces = run.require_traces()
    warn_of_hooks([run])
    plan_and_report(traces, run, settings, executor, failure=run.failure)


def plan_and_report(
    traces: Sequence[Path],
    run: Run,
    settings: Settings,
    executor: str | None,
    *,
    failure: str | None,
    status: int = 0,
    healed: Sequence[NeededSpan] | None = None,
    parts: Sequence[Run] = (),
) -> None:
    """Plan and report; exit with 1 if that fails and the command itself did not.

    Args:
        executor: of ``--executor``.
        failure: why the run failed; None if it didn't.
        status: exit status of the traced command.
        healed: what healing gave back in the parts of a combined run; None for another run.
        parts: of a combined run.
    """
    with workers_for(executor) as workers, Progress("reading libraries") as progress:
        usage = with_pages_of(with_pages(merge_when_ended(lambda: traces), run), parts)
        failure = failure or usage.why_incomplete(UNENDED)
        # Another machine's runs: is GPU code used of a library that is here?
        latest = healed is None or any(
            used.images and Path(used.library.path).exists() for used in usage.libraries
        )
        if healed:
            # In whatever order the parts are given.
            ordered = sorted(healed, key=repr)
            save_healed(run, of_each_path(ordered, (used.library for used in usage.libraries)))
        contents = plan_run(
            usage,
            settings,
            run,
            failure=failure,
            latest=latest,
            workers=workers,
            on_done=progress.update,
            parts=parts,
        )
        run.mark("incomplete", None)
    if not latest:
        print_warning(
            f"{run} is not the last run: no library is here whose GPU code was used; name the "
            "folders of the libraries with --path or paths in negativa.yaml"
        )
    if paragraphs := tuple(render_to_screen(contents, settings.reports)):
        click.echo("\n\n".join(paragraphs))
        if failure is None:
            say_next(run)
    fail_for_limits(contents.report.crossed, status or int(failure is not None))
    if failure is not None and not status:
        raise StoreError(run.why_unplanned())


def warn_of_hooks(runs: Sequence[Run]) -> None:
    """Warn if a plan of the runs kept code for a hook, which no command calls."""
    for run in runs:
        plans: tuple[LibraryPlan, ...] = ()
        # None are there yet, or an earlier release wrote them.
        with contextlib.suppress(StoreError):
            plans = load_plans(run)
        kept = sum(d.reason == KeepReason.HOOK.value for plan in plans for d in plan.decisions)
        if kept:
            print_warning(
                f"{run}: its plan kept {format_items(kept, 'element', 'elements')} for the hook "
                "pytest_negativa_keep_element. Commands call no hooks, so the new plan does not "
                "ask it; trace again with pytest --negativa, or name the kernels in keep.kernels"
            )


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN|URL...")
@click.option(
    "--input-list",
    metavar="FILE",
    type=click.File(),
    help="Take the runs that FILE names, too, one a line; - is standard input.",
)
@click.option(
    "--failure-mode",
    type=click.Choice([mode.value for mode in FailureMode]),
    default=FailureMode.ANY.value,
    help="Fail if any run is bad, only if all are, or never; leave out bad ones. (default: any)",
)
@click.option(
    "--carry-forward",
    "carried",
    metavar="RUN",
    multiple=True,
    help="Take this older run in place of one that is missing. Repeatable.",
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
    input_list: TextIO | None,
    failure_mode: str,
    carried: tuple[str, ...],
    expected: int | None,
    executor: str | None,
    **flags: Any,
) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are ids or folders of traced runs, or folders with trace files: of the shards of a CI job,
    or of machines with other GPUs. A URL is where negativa push sent a run. The result is a new
    run, the same in whatever order they are given. If CPU code was traced in all of them, "negativa
    pages" shows the pages that any of them touched. If each of RUNS is proved, so is the result.

    A result that lacks a bad run, or has an older run in its place, can't be locked. Exit status:
    0, or 1 if a run is bad, a threshold is crossed or nothing is planned because a run failed.
    """
    settings = settings_of(flags)
    folder = RunsFolder(Path(settings.directory))
    listed = (line.strip() for line in input_list or ())
    names = dict.fromkeys(_place(name, folder) for name in (*runs, *filter(None, listed)))
    older = dict.fromkeys(_place(name, folder) for name in carried)
    if not (names or older):
        raise click.UsageError("name the runs to combine: RUN... or --input-list FILE")
    with contextlib.ExitStack() as stack:
        fetched: dict[str, Run | StoreError] = {}
        if any(map(is_url, (*names, *older))):
            folder.make()
            temporary = tempfile.TemporaryDirectory(dir=folder.folder, prefix=".fetched-")
            fetched = fetch_parts((*names, *older), Path(stack.enter_context(temporary)))
        parts = [read_part(name, fetched.get(name)) for name in names]
        parts += [read_part(name, fetched.get(name), carried=True) for name in older]
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
        _combine(parts, folder.new_run(), settings, FailureMode(failure_mode), executor)


def _place(name: str, folder: RunsFolder) -> str:
    """The folder of a run by its id; else the name itself."""
    return str(folder.folder / name) if is_run_id(name) else name


def _combine(
    parts: Sequence[Part],
    run: Run,
    settings: Settings,
    mode: FailureMode,
    executor: str | None,
) -> None:
    """Write a new run of those parts that are good enough, and report it."""
    paths = PathRules(settings.paths)
    parts, left_out = choose_parts(parts, mode)
    for line in left_out:
        print_warning(f"{line}: left out")
    if not parts:
        return
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
        told = f"CPU code that any of them touched: {run}; show it with: negativa pages"
        click.echo(printable(told))
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
