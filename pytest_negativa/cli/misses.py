"""The command ``negativa misses``: what came back to libraries that were slimmed with a spare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.misses import report_misses
from pytest_negativa.cli.common import FOLDER, as_json_option, encode_json, settings_of, show
from pytest_negativa.errors import OptionError
from pytest_negativa.reporting.misses import render_misses
from pytest_negativa.reporting.text import print_warning
from pytest_negativa.settings.flags import click_options
from pytest_negativa.slimming.slim import default_paths
from pytest_negativa.spare.misses import LOG_SUFFIX, read_logs, write_misses
from pytest_negativa.spare.note import handler_library
from pytest_negativa.spare.process_pages import pages_of_process

_LOGS = "NEGATIVA_SPARE_LOG"


@click.command()
@click.argument("folders", nargs=-1, type=FOLDER, metavar="[PATH]...")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="LOG",
    help=f"Read this log, or a folder of logs. (default: that of {_LOGS})",
)
@click.option("--pid", type=int, metavar="PID", help="Write a log of the pages that a process has.")
@click.option(
    "--preload", is_flag=True, help="Print the library to preload, so that processes write logs."
)
@as_json_option("misses")
@click_options("reports.top")
def misses(
    folders: tuple[Path, ...],
    logs: tuple[Path, ...],
    pid: int | None,
    preload: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what came back to libraries that were slimmed with a spare.

    PATH has the libraries; by default, the packages of the interpreter that runs negativa. Start a
    program so to have logs of it, in staging and not in production:

    \b
    LD_PRELOAD=$(negativa misses --preload) NEGATIVA_SPARE_LOG=DIR PROGRAM

    Logs of several machines are added up, by the content of the library.

    --pid needs nothing set up, so it is for production. It logs into the folder LOG which pages of
    its spares a process has now: up to 16 around each that it touched. That needs the rights of a
    debugger.

    misses names the function or the GPU code that was touched first on each page. It needs the
    libraries and their spares, or the originals.

    Exit status: 0, or 1 if a log can't be read.
    """
    if preload:
        handler = handler_library()
        if handler is None:
            raise OptionError("the handler was not built: it needs a C compiler, on x86-64")
        click.echo(handler)
        return
    settings = settings_of(flags)
    places = logs or _default_logs()
    for one in () if pid is None else pages_of_process(pid):
        write_misses(one, places[0] / f"{one.original.hex()[:32]}-{pid}{LOG_SUFFIX}")
    found = read_logs(places, print_warning)
    report = report_misses(found, folders or default_paths())
    if as_json:
        click.echo(encode_json(report), nl=False)
    else:
        show("\n\n".join(render_misses(report, top=settings.reports.top)))


def _default_logs() -> tuple[Path, ...]:
    folder = os.environ.get(_LOGS)
    if not folder:
        raise click.UsageError(f"no --log LOG, and {_LOGS} names no folder of logs")
    return (Path(folder),)
