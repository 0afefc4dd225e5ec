"""The commands that work on runs: trace, locate, debloat, combine.

What they do is done by the plugin's own functions; here are arguments and printing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pytest_negativa.errors import NegativaError, OptionError, StoreError
from pytest_negativa.options import click_options, pick_flags

if TYPE_CHECKING:
    from pytest_negativa.config_models import Settings
    from pytest_negativa.tracing.roles import Run

_COMMAND = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
_PASS_ON = {"allow_interspersed_args": False}

_NO_TRACE = (
    "nothing was traced: no process of the command started CUDA with success (is there a GPU, "
    "and its driver?)"
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
    "trace.accept_failed",
    "reports.formats",
    "reports.top",
)


@click.command(context_settings=_PASS_ON)
@_COMMAND
@click_options(*_TRACE_OPTIONS)
def trace(command: tuple[str, ...], **flags: Any) -> None:
    """Run COMMAND and record the GPU code that it and its children use.

    Exit status: that of COMMAND; 127 if there is no such command.
    """
    from pytest_negativa.rundir import mark_failed, point_latest

    settings = _settings(flags)
    run, status = _run_traced(command, settings)
    # What "negativa locate" takes.
    if not run.trace_files():
        _exit_untraced(run, status, settings)
    if status != 0:
        mark_failed(run.folder)
    point_latest(run.folder)
    click.echo(f"Trace in {run.folder}", err=True)
    click.get_current_context().exit(status)


@click.command()
@click.argument("run", required=False, type=click.Path(exists=True, path_type=Path))
@click_options(*_TRACE_OPTIONS, *_PLAN_OPTIONS)
def locate(run: Path | None, **flags: Any) -> None:
    """Find the unused GPU code of a traced RUN (its folder; the last one by default).

    Writes plans and spans into the run's folder. Exit status: 0, or 1 if a threshold is
    crossed.
    """
    from pytest_negativa.rundir import is_failed

    settings = _settings(flags)
    folder = run or Path(settings.directory) / "latest"
    _conclude(_trace_files(folder), folder.resolve(), settings, sound=not is_failed(folder))


@click.command(context_settings=_PASS_ON)
@_COMMAND
@click_options(*_TRACE_OPTIONS, *_PLAN_OPTIONS)
def debloat(command: tuple[str, ...], **flags: Any) -> None:
    """Run COMMAND traced, then find the GPU code that it did not use: trace and locate.

    Exit status: that of COMMAND; if that is 0, 1 if a threshold is crossed. 127 if there is
    no such command.
    """
    settings = _settings(flags)
    run, status = _run_traced(command, settings)
    if not run.trace_files():
        _exit_untraced(run, status, settings)
    try:
        _conclude(run.trace_files(), run.folder, settings, sound=status == 0)
    except NegativaError as e:
        if status == 0:
            raise
        click.echo(f"negativa: error: {e}", err=True)
    click.get_current_context().exit(status)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click_options(*_TRACE_OPTIONS, *_PLAN_OPTIONS)
def combine(runs: tuple[Path, ...], **flags: Any) -> None:
    """Find the GPU code that none of several RUNS used.

    RUNS are folders of traced runs, or folders with trace files. The result is a run of its
    own. Exit status: 0, or 1 if a threshold is crossed.
    """
    from pytest_negativa.rundir import is_failed

    settings = _settings(flags)
    traces = tuple(dict.fromkeys(p.resolve() for folder in runs for p in _trace_files(folder)))
    run = _new_run(settings)
    _copy(traces, run.trace_dir)
    _conclude(run.trace_files(), run.folder, settings, sound=not any(map(is_failed, runs)))


@click.command()
@click.argument("run", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--used", is_flag=True, help="List the kernels that were used instead.")
@click.option("--library", "glob", default="*", help="Only of libraries of this name (a glob).")
@click_options("config", "directory", "reports.demangle")
def kernels(run: Path | None, used: bool, glob: str, **flags: Any) -> None:
    """List the kernels that a traced RUN did not use, of those its devices could load.

    RUN is the folder of a run that was planned; the last one by default.
    """
    from pytest_negativa.config_globs import LibraryNames, matches_library
    from pytest_negativa.demangle import demangle
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.rundir import load_plans

    settings = _settings(flags)
    spell = demangle if settings.reports.demangle else str
    for plan in load_plans(run or Path(settings.directory) / "latest"):
        library = plan.library
        if not matches_library(glob, LibraryNames(library.path, library.soname)):
            continue
        names = plan.used_kernels if used else plan.unused_kernels
        total = len(plan.used_kernels) + len(plan.unused_kernels)
        word = "used" if used else "unused"
        click.echo(f"{printable(library.path)}: {len(names):,} of {total:,} kernels {word}")
        for name in names:
            click.echo(f"  {printable(spell(name))}")


def _settings(flags: dict[str, Any]) -> Settings:
    from pytest_negativa.config import load_settings

    here = Path.cwd()
    return load_settings(pick_flags(flags), os.environ, root=here, cwd=here)


def _new_run(settings: Settings) -> Run:
    from pytest_negativa.tracing.roles import Run, new_run_id

    return Run(base=Path(settings.directory), run_id=new_run_id(), root=Path.cwd())


def _run_traced(command: Sequence[str], settings: Settings) -> tuple[Run, int]:
    from pytest_negativa.running import EXIT_NOT_FOUND, CommandNotFound, run_traced

    run = _new_run(settings)
    try:
        return run, run_traced(command, run)
    except CommandNotFound as e:
        click.echo(f"negativa: error: {e}", err=True)
        click.get_current_context().exit(EXIT_NOT_FOUND)


def _exit_untraced(run: Run, status: int, settings: Settings) -> NoReturn:
    """End where no process left a trace: with the command's status, but limits don't pass."""
    from pytest_negativa.config_models import Thresholds
    from pytest_negativa.proving.outcomes import outcomes_file

    with contextlib.suppress(OSError):
        outcomes_file(run.folder).unlink()
        for folder in (run.trace_dir, run.folder):
            folder.rmdir()
    click.echo(f"negativa: {_NO_TRACE}", err=True)
    unchecked = settings.thresholds != Thresholds()
    if unchecked:
        click.echo("negativa: so the thresholds can't be checked", err=True)
    click.get_current_context().exit(status or int(unchecked))


def _trace_files(folder: Path) -> tuple[Path, ...]:
    """The trace files of a run's folder, or of a folder that holds nothing else."""
    found = tuple(sorted(folder.glob("trace/*.jsonl"))) or tuple(sorted(folder.glob("*.jsonl")))
    if not found:
        raise OptionError(f"{folder}: no trace files (*.jsonl) here or in its folder trace")
    return found


def _copy(traces: Sequence[Path], folder: Path) -> None:
    """Copy traces into one folder; recordings of different runs may share a name."""
    import shutil

    try:
        folder.mkdir(parents=True)
        for number, path in enumerate(traces):
            target = folder / path.name
            shutil.copy2(path, target if not target.exists() else folder / f"{number}.{path.name}")
    except OSError as e:
        raise StoreError(f"{folder}: traces cannot be copied there: {e.strerror}") from e


def _conclude(traces: Sequence[Path], folder: Path, settings: Settings, *, sound: bool) -> None:
    from pytest_negativa.conclude import conclude
    from pytest_negativa.config_models import ReportFormat
    from pytest_negativa.merge import merge_traces
    from pytest_negativa.models.trace import Role
    from pytest_negativa.progress import ByteProgress
    from pytest_negativa.reporting.terminal import render_nothing, render_report

    with ByteProgress("reading libraries") as progress:
        usage = merge_traces(traces)
        # A test may kill a child, but a session without an end was killed itself.
        ended = all(p.ended or p.header.role is Role.CHILD for p in usage.processes)
        sound = sound and ended
        report = conclude(usage, settings, folder, sound=sound, on_done=progress.update)
    if any(wanted.format is ReportFormat.TERMINAL for wanted in settings.reports.formats):
        text = render_nothing(report)
        click.echo(text or "\n\n".join(render_report(report, settings.reports)))
    for limit in report.crossed:
        click.echo(f"negativa: {limit}", err=True)
    if report.crossed and sound:
        click.get_current_context().exit(1)


COMMANDS = (trace, locate, debloat, combine, kernels)
