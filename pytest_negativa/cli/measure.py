"""The commands that put figures to what was found: measure and image-report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.cli.common import DeviceType, settings_of
from pytest_negativa.errors import StoreError
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.images.suite import Suite
    from pytest_negativa.storage.runs import Run

# A broken image has thousands with one cause.
_MOST_ERRORS = 10

_COMMAND = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
_PASS_ON = {"allow_interspersed_args": False}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings=_PASS_ON)
@click.option(
    "--slim-dir",
    "slim",
    type=_FOLDER,
    help="Folder with the slim libraries, each below it under its original's path; by default "
    "what negativa reconstruct wrote.",
)
@click.option(
    "--runs", "pairs", type=click.IntRange(min=1), default=5, show_default=True,
    help="Runs of each variant that count, for each way of loading.",
)  # fmt: skip
@click.option(
    "--loading",
    type=click.Choice(["lazy", "eager", "both"]),
    help="CUDA_MODULE_LOADING; both by default, lazy where there is no GPU.",
)
@click.option(
    "--cold", is_flag=True, help="Evict the libraries from the page cache before each run."
)
@click.option(
    "--first-result/--no-first-result",
    default=True,
    help="Measure the time to the first GPU result (default: yes).",
)
@click.option(
    "--interval", type=click.FloatRange(min=0.001, max=10), default=0.02, show_default=True,
    metavar="SECONDS", help="Look at memory so often.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON (see: negativa schema measurement).")
@click_options("config", "directory")
@_COMMAND
def measure(
    command: tuple[str, ...],
    slim: Path | None,
    pairs: int,
    loading: str | None,
    cold: bool,
    first_result: bool,
    interval: float,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run COMMAND on original and on slim libraries, and compare.

    In turns, by time, memory, GPU memory, energy, page cache and sizes. Nothing installed is
    changed: the slim libraries are loaded in place of the originals. What COMMAND prints goes to
    files.

    Exit status: 0, or 1 if the runs can't be compared, as when they end differently.
    """
    from pytest_negativa.measuring import session as measured
    from pytest_negativa.measuring.experiment import MeasureRequest

    settings = settings_of(flags)
    request = MeasureRequest(
        command=command,
        copies=measured.copies_of(settings, slim),
        folder=measured.new_folder(settings),
        pairs=pairs,
        loadings=measured.loadings_of(loading),
        cold=cold,
        first_result=first_result,
        interval=interval,
        environ=os.environ,
    )
    measurement = measured.measure_and_write(request)
    if as_json:
        click.echo(_json(measurement), nl=False)
        status = measured.report_failures(measurement)
    else:
        status = measured.show(measurement, request.folder)
    click.get_current_context().exit(status)


def _suite_of_run(run: Run) -> Suite:
    from pytest_negativa.images.suite import suite_of_run
    from pytest_negativa.storage.results import load_plans, load_usage

    usage = load_usage(run)
    if usage is None:
        raise StoreError(
            f"{run}: no traced run here, or one that is not located yet: no {run.usage_file.name}"
        )
    # A run that failed has none.
    return suite_of_run(run.run_id, usage, load_plans(run) if run.plan_files() else ())


@click.command("image-report")
@click.argument("folder", type=_FOLDER, metavar="DIR")
@click.option(
    "--run",
    type=_FOLDER,
    help="Folder of a traced run: tell what it loaded, and what its plan leaves unused.",
)
@click.option(
    "--lock",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lock file: tell the same from that.",
)
@click.option(
    "--arch",
    "devices",
    type=DeviceType(),
    multiple=True,
    help="Code that no such device (sm_90) loads is slimmable; default: devices of run or lock.",
)
@click.option(
    "--top", type=click.IntRange(min=0), default=20, show_default=True, metavar="NUMBER",
    help="Show this many rows of each table; 0 shows all.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON (see: negativa schema image-report).")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Processes to use.")
@click.option("--no-cache", is_flag=True, help="Neither use nor fill the cache of maps.")
@click_options("config")
def image_report(
    folder: Path,
    run: Path | None,
    lock: Path | None,
    devices: tuple[ComputeCapability, ...],
    top: int,
    as_json: bool,
    jobs: int | None,
    no_cache: bool,
    **flags: Any,
) -> None:
    """Show the GPU code in a file tree, and what a suite needs.

    DIR is the root of an unpacked image, or an environment of Python or conda. Libraries are
    matched with those that the suite loaded by content or build id, not by path.

    Exit status: 0, or 1 if a file could not be read.
    """
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.gpucode.cache import open_cache
    from pytest_negativa.images.report import report_image
    from pytest_negativa.images.suite import suite_of_lock
    from pytest_negativa.reporting.image import render_image_report
    from pytest_negativa.storage.lockfile import load_lock
    from pytest_negativa.storage.runs import Run

    if run is not None and lock is not None:
        raise click.UsageError("--run or --lock, not both")
    suite = None
    if run is not None:
        suite = _suite_of_run(Run(run.resolve()))
    elif lock is not None:
        suite = suite_of_lock(load_lock(lock))
    with ByteProgress("reading libraries") as progress:
        report = report_image(
            folder,
            suite,
            devices,
            None if no_cache else open_cache(settings_of(flags).cache),
            jobs,
            progress.update,
        )
    if as_json:
        click.echo(_json(report), nl=False)
    else:
        click.echo("\n\n".join(render_image_report(report, top)))
    for error in report.unreadable[:_MOST_ERRORS]:
        print_error(error)
    if len(report.unreadable) > _MOST_ERRORS:
        more = len(report.unreadable) - _MOST_ERRORS
        print_error(f"{more:,} more files could not be read (see --json)")
    if report.unreadable:
        click.get_current_context().exit(1)


def _json(record: object) -> bytes:
    import msgspec

    from pytest_negativa.storage.records import encode_hook

    data = msgspec.json.encode(record, enc_hook=encode_hook)
    return msgspec.json.format(data, indent=1) + b"\n"


COMMANDS = (measure, image_report)
