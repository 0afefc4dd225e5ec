"""The commands that put a plan to the test: reconstruct, verify, heal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.errors import NegativaError
from pytest_negativa.options import click_options, pick_flags

if TYPE_CHECKING:
    from pytest_negativa.config_models import Settings

_COMMAND = click.argument("command", nargs=-1, type=click.UNPROCESSED)
_RUN = click.option(
    "--run",
    "run",
    type=click.Path(exists=True, path_type=Path),
    help="The traced run's folder; the last run by default.",
)
_PASS_ON = {"allow_interspersed_args": False}


@click.command()
@click.argument("run", required=False, type=click.Path(exists=True, path_type=Path))
@click_options("config", "directory", "verify.fill", "verify.copies")
def reconstruct(run: Path | None, **flags: Any) -> None:
    """Write copies of a traced RUN's libraries in which unused GPU code is overwritten.

    RUN is the folder of a run that was planned; the last one by default. The copies lie below
    reconstructed/ in the folder for runs, under the paths of their originals.

    Exit status: 0, or 1 if a library could not be copied.
    """
    from pytest_negativa.progress import ByteProgress
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes
    from pytest_negativa.rewriting.reconstruct import reconstruct as write_copies
    from pytest_negativa.rundir import load_planned
    from pytest_negativa.verifying import RECONSTRUCTED, compact_options

    settings = _settings(flags)
    planned = load_planned(run or Path(settings.directory) / "latest")
    root = Path(settings.directory) / RECONSTRUCTED
    with ByteProgress("writing copies") as progress:
        made = write_copies(
            planned,
            root,
            fill=settings.verify.fill_byte,
            compact=compact_options(settings),
            on_done=progress.update,
        )
    for library in made.libraries:
        state = "unchanged" if library.reused else "written"
        click.echo(
            f"{printable(library.copy)}: {state}, {format_bytes(library.unused_bytes)} overwritten"
        )
    for refused in made.refused:
        click.echo(f"negativa: error: {printable(refused.why)}", err=True)
    if made.refused:
        click.get_current_context().exit(1)


@click.command(context_settings=_PASS_ON)
@_RUN
@click_options(
    "config", "directory", "verify.fill", "verify.copies", "verify.rerun", "verify.timeout"
)
@_COMMAND
def verify(run: Path | None, command: tuple[str, ...], **flags: Any) -> None:
    """Run COMMAND on copies of its libraries whose unused GPU code is overwritten.

    COMMAND is the one that was traced, and need not be given. Its exit status is what must be
    the same. Exit status: that of COMMAND if the plan is proved, else 1.
    """
    _verify(run, command, _settings(flags))


@click.command(context_settings=_PASS_ON)
@_RUN
@click_options(
    "config",
    "directory",
    "verify.fill",
    "verify.copies",
    "verify.rerun",
    "verify.timeout",
    "verify.heal_runs",
    "verify.heal_minutes",
)
@_COMMAND
def heal(run: Path | None, command: tuple[str, ...], **flags: Any) -> None:
    """Verify; if COMMAND fails, find what must be given back, keep it, and verify again.

    Exit status: that of COMMAND if the plan is proved in the end, else 1.
    """
    _verify(run, command, _settings(flags), healing=True)


def _verify(
    folder: Path | None, command: tuple[str, ...], settings: Settings, *, healing: bool = False
) -> None:
    from msgspec.structs import replace

    from pytest_negativa.models.outcomes import SessionKind
    from pytest_negativa.proving.outcomes import outcomes_file, read_outcomes
    from pytest_negativa.proving.rerun import Program
    from pytest_negativa.running import traced_environment
    from pytest_negativa.supervise import Request, supervise
    from pytest_negativa.tracing.roles import Run

    traced = folder or Path(settings.directory) / "latest"
    session = read_outcomes(outcomes_file(traced))
    if session.kind is SessionKind.PYTEST:
        # As a plain program it has one outcome, and those to compare are its tests'.
        verb, option = ("heal", "--negativa-heal") if healing else ("verify", "--negativa-verify")
        raise NegativaError(
            f"{traced} was traced by pytest; {verb} it with pytest {option} --negativa-run "
            f"{shlex.quote(os.fspath(traced))}"
        )
    words = command or session.command
    if not words:
        raise NegativaError(f"{traced}: doesn't tell which command was traced; give it after --")
    here = Path.cwd()

    def prepare(environ: Mapping[str, str], round_folder: Path) -> Mapping[str, str]:
        run = Run(base=round_folder.parent, run_id=round_folder.name, root=here)
        return traced_environment(environ, run)

    program = Program(command=words, again=words, cwd=here, is_pytest=False)
    request = Request(
        settings=replace(settings, run=os.fspath(traced), healing=healing),
        root=here,
        program=program,
        trace_first=False,
    )
    click.get_current_context().exit(supervise(request, prepare))


def _settings(flags: dict[str, Any]) -> Settings:
    from pytest_negativa.config import load_settings

    here = Path.cwd()
    return load_settings(pick_flags(flags), os.environ, root=here, cwd=here)


COMMANDS = (reconstruct, verify, heal)
