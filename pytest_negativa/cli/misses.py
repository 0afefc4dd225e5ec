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
@as_json_option("misses")
@click_options("config", "reports.top")
def misses(logs: tuple[Path, ...], folders: tuple[Path, ...], as_json: bool, **flags: Any) -> None:
    """Show what came back to libraries that were slimmed with a spare.

    LOG is a log, or a folder of logs. By default it is the folder of NEGATIVA_SPARE_LOG. Start a
    program so to have logs of it, in staging and not in production:

    \b
    LD_PRELOAD=$(negativa misses --preload) NEGATIVA_SPARE_LOG=DIR PROGRAM

    Logs of several machines are added up, by the content of the library.

    misses names the function or the GPU code that was touched first on each page. It needs the
    libraries and their spares, or the originals.

    Exit status: 0, or 1 if a log can't be read.
    """
    from pytest_negativa.analysis.misses import report_misses
    from pytest_negativa.reporting.misses import render_misses
    from pytest_negativa.reporting.text import print_warning
    from pytest_negativa.slimming.slim import default_paths
    from pytest_negativa.spare.misses import read_logs

    settings = settings_of(flags)
    found = read_logs(logs or _default_logs(), print_warning)
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
