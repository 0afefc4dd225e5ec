"""The commands that make and plan runs: trace, locate, debloat, combine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click
from click.core import ParameterSource

from pytest_negativa.cli.common import (
    COMMAND,
    EXECUTOR,
    PASS_ON,
    as_json_option,
    fail_for_limits,
    run_of,
    settings_of,
    warn_of_hooks,
    workers_for,
)
from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.models.settings import FailureMode
from pytest_negativa.reporting.text import print_error, print_warning, printable
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from pytest_negativa.analysis.combine import Part
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.models.verdict import NeededSpan
    from pytest_negativa.storage.runs import Run

_NO_TRACE = (
    "nothing was traced: no process of the command started CUDA successfully (does this machine "
    "have a GPU and its driver?)"
)

_PLAN_OPTIONS = (
    "libraries.include",
    "libraries.exclude",
    "keep.kernels",
    "keep.libraries",
    "keep.archs",
    "keep.ptx",
    "keep.relocatable",
    "granularity",
    "trace.accept_failed",
    "reports.formats",
)


@click.command(context_settings=PASS_ON)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--attach-env",
    "attach",
    is_flag=True,
    help="Print variables to set for a service, so that its processes are traced.",
)
@click.option(
    "--one-of", type=click.IntRange(min=1), default=1, metavar="N",
    help="Trace one in N of these processes, by chance. (default: 1)",
)  # fmt: skip
@click.option(
    "--seconds", type=click.IntRange(min=0), default=600, metavar="S",
    help="Trace each of these processes for S seconds; 0: to its end. (default: 600)",
)  # fmt: skip
@click.option(
    "--files", type=click.IntRange(min=1), default=1000, metavar="N",
    help="Start no trace if there are N files. (default: 1000)",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print these variables as a JSON object.")
@click_options("cpu")
def trace(
    command: tuple[str, ...],
    attach: bool,
    one_of: int,
    seconds: int,
    files: int,
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
    from pytest_negativa.analysis.digests import hash_libraries
    from pytest_negativa.hostcode.gather import gather

    given = click.get_current_context().get_parameter_source
    settings = settings_of(flags)
    if attach:
        if command or settings.cpu:
            raise click.UsageError("--attach-env goes without COMMAND and --cpu")
        _attach(settings, one_of, seconds, files, as_json=as_json)
        return
    if not command:
        raise click.UsageError("Missing argument 'COMMAND...'.")
    for name in ("one_of", "seconds", "files", "as_json"):
        if given(name) is ParameterSource.COMMANDLINE:
            flag = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} goes with --attach-env")
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
    click.echo(printable(f"Trace in {run}"), err=True)
    click.get_current_context().exit(status)


@click.command()
@as_json_option("report")
@EXECUTOR
@click_options("run", *_PLAN_OPTIONS)
def locate(as_json: bool, executor: str | None, **flags: Any) -> None:
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
    _conclude(traces, run, settings, executor, failure=run.failure)


@click.command(context_settings=PASS_ON)
@COMMAND
@EXECUTOR
@click_options(*_PLAN_OPTIONS)
def debloat(command: tuple[str, ...], executor: str | None, **flags: Any) -> None:
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
        _conclude(run.trace_files(), run, settings, executor, failure=failure, status=status)
    except NegativaError as e:
        if status == 0:
            raise
        print_error(e)
    click.get_current_context().exit(status)


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
@EXECUTOR
@click_options("paths", *_PLAN_OPTIONS)
def combine(
    runs: tuple[str, ...],
    input_list: TextIO | None,
    failure_mode: str,
    carried: tuple[str, ...],
    executor: str | None,
    **flags: Any,
) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are folders of traced runs, or folders with trace files: of the shards of a CI job, or of
    machines with other GPUs. A URL is where negativa push sent a run. The result is a new run,
    the same in whatever order they are given. If CPU code was traced in all of them, "negativa
    pages" shows the pages that any of them touched.

    A result that lacks a bad run, or has an older run in its place, can't be locked. Exit status:
    0, or 1 if a run is bad, a threshold is crossed or nothing is planned because a run failed.
    """
    import tempfile

    from pytest_negativa.analysis.combine import fetch_parts, read_part
    from pytest_negativa.storage.runs import RunsFolder
    from pytest_negativa.storage.urls import is_url

    settings = settings_of(flags)
    listed = (line.strip() for line in input_list or ())
    names = dict.fromkeys((*runs, *filter(None, listed)))
    if not (names or carried):
        raise click.UsageError("Name the runs to combine: RUN... or --input-list FILE.")
    folder = RunsFolder(Path(settings.directory))
    with contextlib.ExitStack() as stack:
        fetched: dict[str, Run | StoreError] = {}
        if any(map(is_url, (*names, *carried))):
            folder.make()
            temporary = tempfile.TemporaryDirectory(dir=folder.folder, prefix=".fetched-")
            fetched = fetch_parts((*names, *carried), Path(stack.enter_context(temporary)))
        parts = [read_part(name, fetched.get(name)) for name in names]
        parts += [
            read_part(name, fetched.get(name), carried=True) for name in dict.fromkeys(carried)
        ]
        _combine(parts, folder.new_run(), settings, FailureMode(failure_mode), executor)


def _combine(
    parts: Sequence[Part],
    run: Run,
    settings: Settings,
    mode: FailureMode,
    executor: str | None,
) -> None:
    """Write a new run of those parts that are good enough, and report it."""
    from pytest_negativa.analysis.code_files import combine_opened
    from pytest_negativa.analysis.combine import (
        choose_parts,
        copy_traces,
        healed_at,
        why_partial,
    )
    from pytest_negativa.hostcode.gather import combine as combine_pages
    from pytest_negativa.settings.globs import PathRules
    from pytest_negativa.storage.results import combine_tests

    paths = PathRules(settings.paths)
    parts, left_out = choose_parts(parts, mode, accept_failed=settings.trace.accept_failed)
    for line in left_out:
        print_warning(f"{line}: left out")
    if not parts:
        return
    warn_of_hooks([part.run for part in parts])
    healed = healed_at(paths, parts)
    copies = copy_traces(parts, run, paths)
    runs = [part.run for part in parts]
    combine_pages(run, runs, paths)
    combine_opened(run, runs)
    combine_tests(run, runs)
    run.mark_partial(why_partial(parts, left_out))
    if not any(part.traces for part in parts):
        run.make_latest()
        told = f"CPU code that any of them touched: {run}; show it with: negativa pages"
        click.echo(printable(told))
        return
    failed = [f"{part.name}: {part.failure}" for part in parts if part.failure is not None]
    _conclude(
        run.trace_files(),
        run,
        settings,
        executor,
        failure="; ".join(failed) or None,
        copies=copies,
        healed=healed,
    )


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
    from pytest_negativa.processes.code_files import CodeFileWatch
    from pytest_negativa.storage.results import save_opened
    from pytest_negativa.storage.runs import RunsFolder
    from pytest_negativa.tracing.command import EXIT_NOT_FOUND, CommandNotFound, run_traced

    run = RunsFolder(Path(settings.directory)).new_run()
    environ = _watch_pages(run) if settings.cpu else os.environ
    try:
        with CodeFileWatch(sys.path) as watch:
            status = run_traced(command, run, Path.cwd(), environ)
        if run.trace_files():
            save_opened(run, watch.opened())
        return run, status
    except CommandNotFound as e:
        print_error(e)
        click.get_current_context().exit(EXIT_NOT_FOUND)


def _attach(settings: Settings, one_of: int, seconds: int, files: int, *, as_json: bool) -> None:
    """Print the variables by which processes of a service are traced."""
    import json
    import shlex

    from pytest_negativa.storage.runs import RunsFolder
    from pytest_negativa.tracing.attach import Sampling, attach_environment

    run = RunsFolder(Path(settings.directory)).new_run()
    variables = attach_environment(run, Sampling(one_of, seconds, files))
    if as_json:
        click.echo(json.dumps(variables, indent=1))
    else:
        for name, value in variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
    later = f"negativa lock --add-uses {shlex.quote(str(run))}"
    click.echo(printable(f"Traces go to {run}; later: {later}"), err=True)


def _watch_pages(run: Run) -> dict[str, str]:
    """The environment in which processes record the pages of CPU code that they touch."""
    from pytest_negativa.hostcode.start import begin_logs
    from pytest_negativa.processes.page_watch import watch_environment
    from pytest_negativa.storage.shared_folders import make_logs_folder

    added = watch_environment(os.environ, run.page_logs)
    run.make()
    make_logs_folder(run.page_logs, run.folder.parent)
    begin_logs(run)
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
    from pytest_negativa.analysis.combine import (
        at_all_paths,
        describe_conflicts,
        describe_parts,
        is_used_here,
    )
    from pytest_negativa.analysis.finish import conclude, killed_process
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.reporting.formats import render_to_screen
    from pytest_negativa.storage.results import save_healed
    from pytest_negativa.tracing.merge import merge_when_ended

    with workers_for(executor) as workers, ByteProgress("reading libraries") as progress:
        usage = merge_when_ended(lambda: traces)
        failure = failure or killed_process(usage)
        latest = copies is None or is_used_here(usage)
        if healed:
            save_healed(run, at_all_paths(healed, usage), ())
        contents = conclude(
            usage,
            settings,
            run,
            sound=failure is None,
            reason=failure or "",
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
    is_unplanned = failure is not None and not settings.trace.accept_failed
    fail_for_limits(contents.report.crossed, status or int(is_unplanned))
    if is_unplanned and not status:
        raise StoreError(run.why_unplanned())
