"""The commands that make and plan runs: trace, locate, debloat, combine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pytest_negativa.cli.common import (
    COMMAND,
    EXIT_FAILED,
    PASS_ON,
    as_json_option,
    run_of,
    settings_of,
    warn_of_hooks,
)
from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.storage.runs import Run

_NO_TRACE = (
    "nothing was traced: no process of the command started CUDA successfully (does this machine "
    "have a GPU and its driver?)"
)

_TRACE_OPTIONS = ("config", "directory")
_PLAN_OPTIONS = (
    "libraries.include",
    "libraries.exclude",
    "keep.kernels",
    "keep.libraries",
    "keep.archs",
    "keep.ptx",
    "keep.relocatable",
    "granularity",
    "require_gpu",
    "trace.accept_failed",
    "reports.formats",
    "reports.top",
    "reports.demangle",
    "coverage.libraries",
    "coverage.fail_under",
    "coverage.fail_under_library",
    "thresholds.max_unused_percent",
    "thresholds.max_unused_percent_library",
    "thresholds.min_used_kernels",
    "thresholds.max_gpu_code",
    "thresholds.max_gpu_code_library",
    "compare.baseline",
    "compare.fail",
    "compare.fail_library",
)


@click.command(context_settings=PASS_ON)
@COMMAND
@click_options(*_TRACE_OPTIONS, "cpu")
def trace(command: tuple[str, ...], **flags: Any) -> None:
    """Run COMMAND and record the GPU code that it uses.

    The trace covers child processes, too. With --cpu, "negativa pages" shows the CPU code. Exit
    status: that of COMMAND; 127 if there is no such command.
    """
    from pytest_negativa.analysis.digests import hash_libraries
    from pytest_negativa.hostcode.gather import gather

    settings = settings_of(flags)
    run, status = _run_traced(command, settings)
    # What "negativa locate" takes.
    if not run.trace_files() and not settings.cpu:
        _exit_untraced(run, status, settings)
    # Libraries may be installed anew before "negativa locate" reads them.
    hash_libraries(run)
    if status != 0:
        run.mark_failed(_ended_with(status))
    if settings.cpu:
        gather(run)
    run.make_latest()
    click.echo(f"Trace in {run}", err=True)
    click.get_current_context().exit(status)


@click.command()
@as_json_option("report")
@click_options("run", *_TRACE_OPTIONS, *_PLAN_OPTIONS)
def locate(as_json: bool, **flags: Any) -> None:
    """Find the unused GPU code of a traced run.

    Plans and spans go to the run's folder, and the run becomes the last one. No hook of a
    conftest.py or plugin is called. Exit status: 0, or 1 if a threshold is crossed or nothing is
    planned because the run failed.
    """
    settings = settings_of(flags)
    if as_json:
        settings = _with_json(settings)
    run = run_of(settings)
    traces = run.require_traces()
    warn_of_hooks([run])
    _conclude(traces, run, settings, failure=run.failure)


@click.command(context_settings=PASS_ON)
@COMMAND
@click_options(*_TRACE_OPTIONS, *_PLAN_OPTIONS)
def debloat(command: tuple[str, ...], **flags: Any) -> None:
    """Trace COMMAND, report its unused GPU code; slim removes it.

    The same as trace and locate: libraries stay as they are. Exit status: that of COMMAND; if that
    is 0, that of locate. 127 if there is no such command.
    """
    settings = settings_of(flags)
    run, status = _run_traced(command, settings)
    if not run.trace_files():
        _exit_untraced(run, status, settings)
    failure = _ended_with(status) if status else None
    try:
        _conclude(run.trace_files(), run, settings, failure=failure, status=status)
    except NegativaError as e:
        if status == 0:
            raise
        print_error(e)
    click.get_current_context().exit(status)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click_options(*_TRACE_OPTIONS, *_PLAN_OPTIONS)
def combine(runs: tuple[Path, ...], **flags: Any) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are folders of traced runs, or folders with trace files. The result is a new run. If CPU
    code was traced in all of them, "negativa pages" shows the pages that any of them touched. Exit
    status: 0, or 1 if a threshold is crossed or nothing is planned because one of RUNS failed.
    """
    from pytest_negativa.hostcode.gather import combine as combine_pages
    from pytest_negativa.storage.runs import Run, RunsFolder
    from pytest_negativa.tracing.files import require_ended

    settings = settings_of(flags)
    parts = [Run(folder) for folder in runs]
    # A run of CPU code alone has no other traces.
    traced = [part for part in parts if part.trace_files() or not part.has_pages]
    traces = tuple(dict.fromkeys(p.resolve() for part in traced for p in part.require_traces()))
    require_ended(traces)
    warn_of_hooks(parts)
    run = RunsFolder(Path(settings.directory)).new_run()
    run.add_traces(traces)
    combine_pages(run, parts)
    if not traced:
        run.make_latest()
        click.echo(f"CPU code that any of them touched: {run}; show it with: negativa pages")
        return
    failed = [f"{part}: {part.failure}" for part in parts if part.failure is not None]
    # Digests lie beside the traces of the parts.
    _conclude(traces, run, settings, failure="; ".join(failed) or None)


def _with_json(settings: Settings) -> Settings:
    """The same, with JSON on standard output in the place of what is printed."""
    from msgspec.structs import replace

    from pytest_negativa.models.settings import Report, ReportFormat

    files = tuple(wanted for wanted in settings.reports.formats if wanted.path is not None)
    formats = (*files, Report(format=ReportFormat.JSON, path="-"))
    return replace(settings, reports=replace(settings.reports, formats=formats))


def _ended_with(status: int) -> str:
    return f"the command ended with exit status {status}"


def _run_traced(command: Sequence[str], settings: Settings) -> tuple[Run, int]:
    from pytest_negativa.storage.runs import RunsFolder
    from pytest_negativa.tracing.command import EXIT_NOT_FOUND, CommandNotFound, run_traced

    run = RunsFolder(Path(settings.directory)).new_run()
    environ = _watch_pages(run) if settings.cpu else os.environ
    try:
        return run, run_traced(command, run, Path.cwd(), environ)
    except CommandNotFound as e:
        print_error(e)
        click.get_current_context().exit(EXIT_NOT_FOUND)


def _watch_pages(run: Run) -> dict[str, str]:
    """The environment in which processes record the pages of CPU code that they touch."""
    from pytest_negativa.hostcode.gather import begin
    from pytest_negativa.processes.page_watch import watch_environment
    from pytest_negativa.processes.redirect import make_logs_folder

    added = watch_environment(os.environ, run.page_logs)
    run.make()
    make_logs_folder(run.page_logs, run.folder.parent)
    begin(run)
    return {**os.environ, **added}


def _exit_untraced(run: Run, status: int, settings: Settings) -> NoReturn:
    """End a run without a trace: with the command's status, or 1 if such a run must fail."""
    run.remove_untraced()
    click.echo(f"negativa: {_NO_TRACE}", err=True)
    failure = settings.untraced_failure
    if failure is not None:
        click.echo(f"negativa: {failure}", err=True)
    click.get_current_context().exit(status or int(failure is not None))


def _conclude(
    traces: Sequence[Path],
    run: Run,
    settings: Settings,
    *,
    failure: str | None,
    status: int = 0,
) -> None:
    """Plan and report; exit with 1 if that fails and the command itself did not.

    Args:
        failure: why the run failed; None if it didn't.
        status: exit status of the traced command.
    """
    from pytest_negativa.analysis.finish import conclude, killed_process
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.reporting.formats import render_to_screen
    from pytest_negativa.tracing.merge import merge_when_ended

    with ByteProgress("reading libraries") as progress:
        usage = merge_when_ended(lambda: traces)
        failure = failure or killed_process(usage)
        contents = conclude(
            usage,
            settings,
            run,
            sound=failure is None,
            reason=failure or "",
            on_done=progress.update,
        )
        run.mark_complete()
    report = contents.report
    if paragraphs := tuple(render_to_screen(contents, settings.reports)):
        click.echo("\n\n".join(paragraphs))
    for limit in report.crossed:
        click.echo(f"negativa: {limit}", err=True)
    unplanned = failure is not None and not settings.trace.accept_failed
    if unplanned and not status:
        raise StoreError(run.why_unplanned())
    if report.crossed and not status:
        click.get_current_context().exit(EXIT_FAILED)
