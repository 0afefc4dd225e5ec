"""``negativa misses``: what came back to libraries that were slimmed with a spare; its logs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.misses import count_misses, report_misses
from pytest_negativa.cli.common import (
    FOLDER,
    LOCK,
    active_paths,
    answer,
    as_json_option,
    as_words,
    check_usage,
    print_variables,
    settings_of,
    show,
)
from pytest_negativa.pages.auditors import misses_environment
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.reporting.pages import render_missed_code, render_misses
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.settings.flags import click_options

_LOGS = "NEGATIVA_SPARE_LOG"


@click.command()
@click.argument("folders", nargs=-1, type=FOLDER, metavar="[PATH]...")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="LOG",
    help=f"Read this log, or a folder of logs. (default: that of {_LOGS})",
)
@click.option(
    "--attach-env",
    "attach",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Print variables with which processes write logs into DIR.",
)
@as_json_option("misses")
@click_options("reports.top")
def misses(
    folders: tuple[Path, ...],
    logs: tuple[Path, ...],
    attach: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what came back to libraries that were slimmed with a spare.

    PATH has the libraries; by default, the active environment. Logs of several machines are added
    up, by the content of the library.

    --attach-env reads no log: it prints lines for a shell. Processes that have these variables
    write logs, in staging and not in production:

    \b
    eval "$(negativa misses --attach-env DIR)"

    misses names the function or the GPU code that was touched first on each page, of the --top
    libraries; with --json, of all. It needs the libraries and their spares, or the originals.

    Exit status: 0, or 1 if a log can't be read.
    """
    settings = settings_of(flags)
    if attach is not None:
        print_variables(misses_environment(os.environ, attach), as_json=as_json)
        return
    folder_of_logs = os.environ.get(_LOGS)
    places = logs or ((Path(folder_of_logs),) if folder_of_logs else ())
    check_usage((not places, f"no --log LOG, and {_LOGS} names no folder of logs"))
    folders = folders or active_paths()
    top = settings.reports.top
    with Progress("reading logs"):
        found = read_misses(places)
    if not as_json:
        # Names take nearly all of the time.
        show("\n\n".join(render_misses(count_misses(found), top=top)) + "\n")
    with Progress("reading libraries"):
        report = report_misses(found, folders, top=0 if as_json else top)
    then = f"negativa slim check {as_words(folders)}"
    if Path(LOCK).is_file() and report.rows:
        added = " ".join(f"--add-misses {as_words([log])}" for log in places)
        then = f"negativa lock {added} {as_words(folders)}"
    answer(report, render_missed_code(report.rows, top=top), as_json=as_json, then=then)
