"""The command that shows the GPU code in a file tree: image-report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_negativa.cli.common import (
    EXECUTOR,
    EXIT_FAILED,
    JOBS,
    NO_CACHE,
    PathOrUrl,
    arch_option,
    as_json_option,
    encode_json,
    note_unopened,
    settings_of,
    show,
    workers_for,
)
from pytest_negativa.reporting.text import print_error
from pytest_negativa.storage.urls import Url

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability

# A broken image has thousands with one cause.
_MOST_ERRORS = 10


@click.command("image-report")
@click.argument("folder", type=click.Path(exists=True, path_type=Path), metavar="IMAGE")
@click.option(
    "--run",
    type=PathOrUrl(exists=True, file_okay=False, path_type=Path),
    metavar="DIR|URL",
    help="Show what this traced run loaded, and what its plan leaves unused.",
)
@click.option(
    "--lock",
    type=PathOrUrl(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE|URL",
    help="Show what the libraries of this lock file need.",
)
@arch_option("--arch", "devices", "Call code slimmable that no such device (sm_90) loads.")
@click.option(
    "--top", type=click.IntRange(min=0), default=20, metavar="N",
    help="Show this many rows of each table; 0 shows all. (default: 20)",
)  # fmt: skip
@as_json_option("image-report")
@JOBS
@EXECUTOR
@NO_CACHE
def image_report(
    folder: Path,
    run: Path | Url | None,
    lock: Path | Url | None,
    devices: tuple[ComputeCapability, ...],
    top: int,
    as_json: bool,
    jobs: int | None,
    executor: str | None,
    no_cache: bool,
) -> None:
    """Show the GPU code in a file tree, and what a suite needs.

    IMAGE is the root of an unpacked image, an environment of Python or conda, or an archive of
    one: a saved image (docker save, OCI; a folder or a tar archive), a tar archive or a wheel.
    A library is one that the suite loaded if content or build id agree; paths don't matter.
    Without --arch, the devices are those of the run or the lock.

    Exit status: 0, or 1 if a file could not be read.
    """
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.gpucode.cache import open_cache
    from pytest_negativa.images.containers import is_container
    from pytest_negativa.images.report import report_image
    from pytest_negativa.images.suite import load_suite, suite_of_lock
    from pytest_negativa.reporting.image import render_image_report
    from pytest_negativa.storage.lockfile import load_lock
    from pytest_negativa.storage.runs import RunsFolder

    if run is not None and lock is not None:
        raise click.UsageError("--run or --lock, not both")
    settings = settings_of()
    suite = None
    if run is not None:
        suite = load_suite(RunsFolder(Path(settings.directory)).find(str(run)))
    elif lock is not None:
        suite = suite_of_lock(load_lock(lock))
    with workers_for(executor, jobs) as workers, ByteProgress("reading libraries") as progress:
        report = report_image(
            folder,
            suite,
            devices,
            None if no_cache else open_cache(settings.cache),
            workers,
            progress.update,
        )
    if as_json:
        click.echo(encode_json(report), nl=False)
    else:
        show("\n\n".join(render_image_report(report, top)))
    if not (report.libraries or report.code_files or is_container(folder)):
        note_unopened(folder)
    for error in report.unreadable[:_MOST_ERRORS]:
        print_error(error)
    if len(report.unreadable) > _MOST_ERRORS:
        more = len(report.unreadable) - _MOST_ERRORS
        print_error(f"{more:,} more files could not be read (see --json)")
    if report.unreadable:
        click.get_current_context().exit(EXIT_FAILED)
