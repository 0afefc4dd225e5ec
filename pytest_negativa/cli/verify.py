"""``negativa reconstruct`` and ``verify`` (``--heal``): copies, and the proof on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.report import crossed_limits, report_verified
from pytest_negativa.cli.common import (
    PASS_ON,
    fail_for,
    fail_for_limits,
    runs_of,
    say_next,
    settings_and_run,
)
from pytest_negativa.errors import ExitStatus
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import printable
from pytest_negativa.rewriting.reconstruct import reconstruct as write_copies
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.results import load_planned
from pytest_negativa.verifying.rounds import Program
from pytest_negativa.verifying.supervisor import run_supervisor, verify_program
from pytest_negativa.verifying.traced_run import command_to_verify
from pytest_negativa.verifying.verification import compact_options

_COMMAND = click.argument("command", nargs=-1, type=click.UNPROCESSED)

_VERIFY_OPTIONS = (
    "run",
    "healing",
    "verify.copies",
    "verify.rerun",
    "verify.timeout",
    "verify.opened_originals",
    "reports.formats",
    "cpu",
)


@click.command()
@click_options("run", "verify.copies")
def reconstruct(**flags: Any) -> None:
    """Write copies of libraries without their unused GPU code.

    The copies of a planned run's libraries lie below reconstructed/ in the folder for runs, under
    the paths of their originals. Unused GPU code in them is overwritten, or they are compacted. A
    library that can't be compacted is overwritten instead, with the reason.

    Exit status: 0, or 1 if a library could not be copied.
    """
    settings, run = settings_and_run(flags)
    # Files that are GPU code have no copies.
    planned = [one for one in load_planned(run) if not one.plan.is_files]
    root = runs_of(settings).copies
    with Progress("writing copies") as progress:
        made = write_copies(
            planned,
            root,
            compact=compact_options(settings),
            on_done=progress.update,
        )
    for library in made.libraries:
        state = "unchanged" if library.reused else "written"
        if library.compaction is not None:
            sizes = map(format_bytes, (library.library.size, library.compaction.size))
            state += f", compacted from {' to '.join(sizes)}"
        else:
            state += f", {format_bytes(library.unused_bytes)} overwritten"
        if library.not_compacted is not None:
            state += f" instead of compacted: {library.not_compacted}"
        click.echo(f"{printable(library.copy)}: {printable(state)}")
    fail_for(made.refused.values())
    say_next(run)


@click.command(context_settings=PASS_ON)
@click_options(*_VERIFY_OPTIONS)
@_COMMAND
def verify(command: tuple[str, ...], **flags: Any) -> None:
    """Run COMMAND on copies without unused GPU code.

    By default, COMMAND is the traced one. It must end with the same exit status as when traced.

    With --heal, code that the driver refused or a process touched is given back, and the plan is
    verified again. Later plans of the run keep that code.

    Exit status: that of COMMAND if the plan is proved, in the end, else 1. If that is 0, 1 if a
    limit of negativa.yaml is crossed.
    """
    settings, run = settings_and_run(flags)
    words = command_to_verify(run, settings, command, healing=settings.healing)
    here = Path.cwd()
    program = Program(
        command=words,
        again=words,
        cwd=here,
        root=here,
        environ=os.environ,
        is_pytest=False,
    )
    status = run_supervisor(
        lambda: verify_program(program, settings, run, lambda run: report_verified(run, settings)),
        ExitStatus.USAGE,
    )
    if status == 0 and run.plan_files():
        fail_for_limits(crossed_limits(run, settings))
    click.get_current_context().exit(status)
