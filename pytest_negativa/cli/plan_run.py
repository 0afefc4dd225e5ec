"""Planning a run, for the commands locate, debloat and combine."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click

from pytest_negativa.analysis.combine import (
    at_all_paths,
    describe_conflicts,
    describe_parts,
    is_used_here,
)
from pytest_negativa.analysis.report import killed_process, plan_run
from pytest_negativa.cli.common import (
    fail_for_limits,
    say_next,
    workers_for,
)
from pytest_negativa.errors import StoreError
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import NeededSpan
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_warning, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.results import load_plans, save_healed
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_when_ended

PLAN_OPTIONS = (
    "libraries.include",
    "libraries.exclude",
    "keep.kernels",
    "keep.libraries",
    "keep.archs",
    "keep.ptx",
    "keep.relocatable",
    "granularity",
    "reports.formats",
)


def plan_and_report(
    traces: Sequence[Path],
    run: Run,
    settings: Settings,
    executor: str | None,
    *,
    failure: str | None,
    status: int = 0,
    copies: Mapping[str, Collection[str]] | None = None,
    healed: Sequence[NeededSpan] = (),
) -> None:
    """Plan and report; exit with 1 if that fails and the command itself did not.

    Args:
        executor: of ``--executor``.
        failure: why the run failed; None if it didn't.
        status: exit status of the traced command.
        copies: of a combined run the names of the traces by part; None for another run.
        healed: of a combined run what healing gave back in its parts.
    """
    with workers_for(executor) as workers, Progress("reading libraries") as progress:
        usage = merge_when_ended(lambda: traces)
        failure = failure or killed_process(usage)
        latest = copies is None or is_used_here(usage)
        if healed:
            save_healed(run, at_all_paths(healed, usage), ())
        contents = plan_run(
            usage,
            settings,
            run,
            failure=failure,
            latest=latest,
            workers=workers,
            on_done=progress.update,
        )
        run.mark_complete()
    for text in (*describe_parts(usage, copies), *describe_conflicts(usage)) if copies else ():
        print_warning(text)
    if not latest:
        told = f"{run} is not the last run: no library is here whose GPU code was used"
        click.echo(printable(told))
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
