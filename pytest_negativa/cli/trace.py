"""The command that runs and traces a program: trace."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pytest_negativa.analysis.digests import hash_libraries
from pytest_negativa.cli.common import (
    PASS_ON,
    print_variables,
    say_next,
    settings_of,
)
from pytest_negativa.cli.program import exit_untraced, trace_command, why_failed
from pytest_negativa.hostcode.gather import gather
from pytest_negativa.models.settings import Settings
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import printable
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.runs import RunsFolder
from pytest_negativa.tracing.attach import Sampling, attach_environment


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
    run, status = trace_command(command, settings)
    # What "negativa locate" takes.
    if not run.trace_files() and not settings.cpu:
        exit_untraced(run, status, settings)
    # Libraries may be installed anew before "negativa locate" reads them.
    with Progress("hashing libraries"):
        hash_libraries(run)
    if (failure := why_failed(status)) is not None:
        run.mark("failed", failure)
    if settings.cpu:
        gather(run)
    run.make_latest()
    click.echo(printable(f"Trace in {run}"), err=True)
    say_next("negativa locate" if run.trace_files() else run)
    click.get_current_context().exit(status)


def _attach(settings: Settings, one_of: int, seconds: int, files: int, *, as_json: bool) -> None:
    """Print the variables by which processes of a service are traced."""
    run = RunsFolder(Path(settings.directory)).new_run()
    variables = attach_environment(run, Sampling(one_of, seconds, files))
    print_variables(variables, as_json=as_json)
    later = f"negativa lock --add-uses {shlex.quote(str(run))}"
    click.echo(printable(f"Traces go to {run}; later: {later}"), err=True)
