"""``negativa trace``, ``locate`` and ``debloat``: a traced command, samples of services, plans."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from pytest_negativa.analysis.report import plan_traces
from pytest_negativa.cli.common import (
    COMMAND,
    EXECUTOR,
    PASS_ON,
    check_usage,
    fail_for_limits,
    print_variables,
    runs_of,
    say_next,
    settings_and_run,
    settings_of,
    show,
    workers_for,
)
from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import Need
from pytest_negativa.pages.gather import gather
from pytest_negativa.pages.page_watch import watch_pages
from pytest_negativa.processes.open_watch import CodeFileWatch
from pytest_negativa.reporting.formats import render_to_screen
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_error, print_warning, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.results import load_plans, save_opened
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.command import attach_environment, run_traced
from pytest_negativa.tracing.merge import hash_libraries

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


# Of samples if no flag says otherwise, see ``attach_environment``.
_LIMITS = {"one_of": 1, "seconds": 600, "files": 1000}


@click.command(context_settings=PASS_ON)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--attach-env",
    "attach",
    is_flag=True,
    help="Print variables to set for a service, so that its processes are traced.",
)
@click.option(
    "--one-of", type=click.IntRange(min=1), metavar="N",
    help="Trace one in N of these processes, by chance. (default: 1)",
)  # fmt: skip
@click.option(
    "--seconds", type=click.IntRange(min=0), metavar="S",
    help="Trace each of these processes for S seconds; 0: to its end. (default: 600)",
)  # fmt: skip
@click.option(
    "--files", type=click.IntRange(min=1), metavar="N",
    help="Start no trace if there are N files. (default: 1000)",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print these variables as a JSON object.")
@click_options("cpu")
def trace(
    command: tuple[str, ...],
    attach: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run COMMAND and record the GPU code that it uses.

    The trace covers child processes, too. With --cpu, "negativa pages" shows the CPU code. Exit
    status: that of COMMAND; 127 if there is no such command.

    With --attach-env, trace runs no COMMAND: it prints lines for a shell. Processes that have these
    variables write samples into a new run. What samples use is kept, and what they don't use proves
    nothing: widen a lock by their run (negativa lock --add-uses), or combine it with that of the
    tests.
    """
    settings = settings_of(flags)
    limits = {name: flags[name] for name in _LIMITS if flags[name] is not None}
    check_usage(
        (
            (limits or as_json) and not attach,
            "--one-of, --seconds, --files and --json go with --attach-env",
        ),
        (attach and (command or settings.cpu), "--attach-env goes without COMMAND and --cpu"),
        (not (attach or command), "Missing argument 'COMMAND...'."),
    )
    if attach:
        run = runs_of(settings).new_run()
        limits = {**_LIMITS, **limits}
        variables = attach_environment(run, limits["one_of"], limits["seconds"], limits["files"])
        print_variables(variables, as_json=as_json)
        later = f"negativa lock --add-uses {shlex.quote(str(run))}"
        click.echo(printable(f"Traces go to {run}; later: {later}"), err=True)
        return
    run, status = trace_command(command, settings)
    # What "negativa locate" takes.
    if not run.trace_files() and not settings.cpu:
        exit_untraced(run, status, settings)
    # Libraries may be installed anew before "negativa locate" reads them.
    with Progress("hashing libraries") as progress:
        hash_libraries(run, progress.update)
    if (failure := why_failed(status)) is not None:
        run.mark("failed", failure)
    if settings.cpu:
        gather(run)
    run.make_latest()
    click.echo(printable(f"Trace in {run}"), err=True)
    say_next("negativa locate" if run.trace_files() else run)
    click.get_current_context().exit(status)


@click.command(context_settings=PASS_ON)
@COMMAND
@EXECUTOR
@click_options(*PLAN_OPTIONS)
def debloat(command: tuple[str, ...], executor: str | None, **flags: Any) -> None:
    """Trace COMMAND, report its unused GPU code; slim removes it.

    The same as trace and locate: libraries stay as they are. Exit status: that of COMMAND; if that
    is 0, that of locate. 127 if there is no such command.
    """
    settings = settings_of(flags)
    run, status = trace_command(command, settings)
    if not run.trace_files():
        exit_untraced(run, status, settings)
    failure = why_failed(status)
    try:
        plan_and_report(run.trace_files(), run, settings, executor, failure=failure, status=status)
    except NegativaError as e:
        if status == 0:
            raise
        print_error(e)
    click.get_current_context().exit(status)


def trace_command(command: Sequence[str], settings: Settings) -> tuple[Run, int]:
    """Run a command traced, into a new run; returns its exit status, too."""
    run = runs_of(settings).new_run()
    environ: Mapping[str, str] = os.environ
    if settings.cpu:
        environ = watch_pages(environ, run, run.folder.parent)
    watch = CodeFileWatch(sys.path)
    with watch:
        status = run_traced(command, run, Path.cwd(), environ, settings.trace.level)
    if run.trace_files():
        save_opened(run, watch.opened())
    return run, status


def exit_untraced(run: Run, status: int, settings: Settings) -> NoReturn:
    """End a run without a trace: with the command's status, or 1 if such a run must fail."""
    run.remove_untraced()
    show(
        "negativa: nothing was traced: no process of the command started CUDA successfully; "
        "negativa doctor shows what this machine lacks",
        err=True,
    )
    failure = settings.untraced_failure
    if failure is not None:
        click.echo(f"negativa: {failure}", err=True)
    click.get_current_context().exit(status or int(failure is not None))


def why_failed(status: int) -> str | None:
    """The reason to plan nothing from a command's trace; None if no signal ended the command.

    Shells return 128 and the number of the signal.
    """
    return f"the command ended with exit status {status}" if status >= 128 else None


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
