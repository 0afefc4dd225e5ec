"""The command ``negativa misses``: what came back to libraries that were slimmed with a spare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pytest_negativa.cli.common import FOLDER, as_json_option, encode_json, settings_of, show
from pytest_negativa.settings.flags import click_options

_LOGS = "NEGATIVA_SPARE_LOG"


@click.command()
@click.argument("logs", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[LOG]...")
@click.option(
    "--in",
    "folders",
    multiple=True,
    type=FOLDER,
    metavar="DIR",
    help="Search the libraries here. (default: this interpreter's packages)",
)
@click.option(
    "--pid", type=int, metavar="PID", help="Show pages that a running process has, without a log."
)
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write what --pid shows as logs into DIR, for --add-misses.",
)
@click.option(
    "--preload", is_flag=True, help="Print the library to preload, so that processes write logs."
)
@as_json_option("misses")
@click_options("config", "reports.top")
def misses(
    logs: tuple[Path, ...],
    folders: tuple[Path, ...],
    pid: int | None,
    save: Path | None,
    preload: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what came back to libraries that were slimmed with a spare.

    LOG is a log, or a folder of logs. By default it is the folder of NEGATIVA_SPARE_LOG. Start a
    program so to have logs of it, in staging and not in production:

    \b
    LD_PRELOAD=$(negativa misses --preload) NEGATIVA_SPARE_LOG=DIR PROGRAM

    Logs of several machines are added up, by the content of the library.

    --pid needs no log, so it is for production. It shows which pages of its spares a process has
    now: up to 16 around each that it touched. That needs the rights of a debugger.

    misses names the function or the GPU code that was touched first on each page. It needs the
    libraries and their spares, or the originals.

    Exit status: 0, or 1 if a log can't be read.
    """
    from pytest_negativa.analysis.misses import report_misses
    from pytest_negativa.reporting.misses import render_misses
    from pytest_negativa.reporting.text import print_warning
    from pytest_negativa.slimming.slim import default_paths
    from pytest_negativa.spare.misses import read_logs, write_misses
    from pytest_negativa.spare.note import handler_library
    from pytest_negativa.spare.process_pages import pages_of_process

    if preload:
        handler = handler_library()
        if handler is None:
            raise click.ClickException(
                "the handler was not built: it needs a C compiler, on x86-64"
            )
        click.echo(handler)
        return
    settings = settings_of(flags)
    if pid is None:
        found = read_logs(logs or _default_logs(), print_warning)
    else:
        found = pages_of_process(pid)
        if save is not None:
            for one in found:
                write_misses(one, save)
    report = report_misses(found, folders or default_paths())
    if as_json:
        click.echo(encode_json(report), nl=False)
    else:
        show("\n\n".join(render_misses(report, top=settings.reports.top)))


def _default_logs() -> tuple[Path, ...]:
    folder = os.environ.get(_LOGS)
    if not folder:
        raise click.UsageError(f"no LOG, and {_LOGS} names no folder of logs")
    return (Path(folder),)
