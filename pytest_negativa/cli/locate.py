"""``negativa locate``, and the plan of all commands that end with one: no hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.report import plan_traces
from pytest_negativa.cli.common import (
    EXECUTOR,
    fail_for_limits,
    say_next,
    settings_and_run,
    workers_for,
)
from pytest_negativa.errors import StoreError
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import Need
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_warning
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import Run

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
    healed: Sequence[Need] = (),
    parts: Sequence[Run] = (),
) -> None:
    """Plan and report; exit with 1 if that fails and the command itself did not.

    Args:
        executor: of ``--executor``.
        failure: why the run failed; None if it didn't.
        status: exit status of the traced command.
        healed, parts: of a combined run, see ``plan_traces``.
    """
    with workers_for(executor) as workers, Progress("reading libraries") as progress:
        contents = plan_traces(
            traces,
            run,
            settings,
            failure=failure,
            healed=healed,
            parts=parts,
            workers=workers,
            on_done=progress.update,
        )
    has_failed = run.failure is not None
    if paragraphs := tuple(render_to_screen(contents, settings.reports)):
        click.echo("\n\n".join(paragraphs))
        if not has_failed:
            say_next(run)
    fail_for_limits(contents.report.crossed, status or int(has_failed))
    if has_failed and not status:
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
