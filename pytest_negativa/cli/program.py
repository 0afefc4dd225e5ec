"""Running a program under the tracer, for the commands trace and debloat."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from pytest_negativa.hostcode.start import begin_logs
from pytest_negativa.models.settings import Settings
from pytest_negativa.processes.code_files import CodeFileWatch
from pytest_negativa.processes.page_watch import watch_environment
from pytest_negativa.reporting.text import print_error
from pytest_negativa.storage.results import save_opened
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.shared_folders import make_logs_folder
from pytest_negativa.tracing.command import EXIT_NOT_FOUND, CommandNotFound, run_traced

_NO_TRACE = (
    "nothing was traced: no process of the command started CUDA successfully; negativa doctor "
    "shows what this machine lacks"
)


def trace_command(command: Sequence[str], settings: Settings) -> tuple[Run, int]:
    """Run a command traced, into a new run; returns its exit status, too."""
    run = RunsFolder(Path(settings.directory)).new_run()
    environ = _watch_pages(run) if settings.cpu else os.environ
    try:
        with CodeFileWatch(sys.path) as watch:
            status = run_traced(command, run, Path.cwd(), environ, settings.trace.level)
        if run.trace_files():
            save_opened(run, watch.opened())
        return run, status
    except CommandNotFound as e:
        print_error(e)
        click.get_current_context().exit(EXIT_NOT_FOUND)


def _watch_pages(run: Run) -> dict[str, str]:
    """The environment in which processes record the pages of CPU code that they touch."""
    added = watch_environment(os.environ, run.page_logs)
    run.make()
    make_logs_folder(run.page_logs, run.folder.parent)
    begin_logs(run)
    return {**os.environ, **added}


def exit_untraced(run: Run, status: int, settings: Settings) -> NoReturn:
    """End a run without a trace: with the command's status, or 1 if such a run must fail."""
    run.remove_untraced()
    click.echo(f"negativa: {_NO_TRACE}", err=True)
    failure = settings.untraced_failure
    if failure is not None:
        click.echo(f"negativa: {failure}", err=True)
    click.get_current_context().exit(status or int(failure is not None))


def why_failed(status: int) -> str | None:
    """Why nothing is planned from a command's trace; None if no signal ended the command.

    Shells return 128 and the number of the signal.
    """
    return f"the command ended with exit status {status}" if status >= 128 else None
