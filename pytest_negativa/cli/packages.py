"""The view of ``negativa inspect`` by package: a file tree, and what a suite needs of it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.common import (
    EXIT_FAILED,
    answer,
    note_unopened,
    runs_of,
    settings_of,
    slim_by,
    workers_for,
)
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.images.layers import is_container
from pytest_negativa.images.report import report_image
from pytest_negativa.images.suite import load_suite, suite_of_lock
from pytest_negativa.reporting.image import render_image_report
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_error
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.urls import Url

# A broken image has thousands with one cause.
_MOST_ERRORS = 10


def show_packages(
    folder: Path,
    run: str | None,
    lock: Path | Url | None,
    devices: tuple[ComputeCapability, ...],
    top: int,
    then: str | None,
    *,
    as_json: bool,
    jobs: int | None,
    executor: str | None,
    no_cache: bool,
) -> None:
    """Show the GPU code in a file tree by package, and what a suite needs.

    Args:
        then: the next command, without a run or a lock.
    """
    settings = settings_of()
    suite = None
    if run is not None:
        then = f"negativa report {shlex.quote(run)}"
        suite = load_suite(runs_of(settings).find(run))
    elif lock is not None:
        then = slim_by(lock)
        suite = suite_of_lock(load_lock(lock))
    with workers_for(executor, jobs) as workers, Progress("reading libraries") as progress:
        report = report_image(
            folder,
            suite,
            devices,
            None if no_cache else open_cache(settings.cache),
            workers,
            progress.update,
        )
    then = then if report.libraries and not report.unreadable else None
    answer(report, render_image_report(report, top), as_json=as_json, then=then)
    if not (report.libraries or is_container(folder)):
        note_unopened(folder)
    for error in report.unreadable[:_MOST_ERRORS]:
        print_error(error)
    if len(report.unreadable) > _MOST_ERRORS:
        more = len(report.unreadable) - _MOST_ERRORS
        print_error(f"{more:,} more files could not be read (see --json)")
    if report.unreadable:
        click.get_current_context().exit(EXIT_FAILED)
