"""``negativa inspect``: GPU code in libraries, gates for wheels, tables by package."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_negativa.analysis.inspect import (
    InspectionRequest,
    errors_of,
    inspect_libraries,
    inspection_of,
    missing_archs,
    render_text,
    too_much_dead,
)
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.common import (
    EXECUTOR,
    JOBS,
    LOCK_FILE,
    MATCH,
    NO_CACHE,
    active_paths,
    answer,
    arch_option,
    as_json_option,
    check_usage,
    fail_for,
    note_unopened,
    option_reader,
    run_of,
    say_next,
    settings_of,
    show,
    slim_by,
    workers_for,
)
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.images.layers import is_container
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.units import and_more
from pytest_negativa.settings.options import BY_NAME
from pytest_negativa.settings.values import read_percent
from pytest_negativa.storage.urls import Url

_ROWS = 20


@click.command()
@click.argument("libraries", nargs=-1, metavar="[PATH]...")
@arch_option("--arch", "devices", "Show what devices of these archs (sm_90, H100) load, too.")
@arch_option(
    "--require-arch",
    "required",
    "Fail (exit 1) unless each library has some code for each of these archs.",
)
@click.option(
    "--max-dead",
    metavar="PERCENT",
    callback=option_reader(read_percent),
    help="Fail (exit 1) if more of a PATH is for other GPUs than --arch.",
)
@click.option("--deps", is_flag=True, help="Take the distributions that one requires, too.")
@click.option("--kernels", is_flag=True, help="List the kernels by mangled name.")
@MATCH
@click.option(
    "--top",
    type=click.IntRange(min=0),
    metavar="N",
    help="List at most N rows of each table of --packages; 0 lists all.",
)
@click.option("--elements", is_flag=True, help="List every element by file offset.")
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@click.option("--packages", is_flag=True, help="Show a file tree or an image by package.")
@click.option("--run", metavar="RUN", help="Show what this run loaded and leaves unused.")
@click.option(
    "--lock",
    type=LOCK_FILE,
    metavar="FILE|URL",
    help="Show what the libraries of this lock file need.",
)
@as_json_option("inspection")
@JOBS
@EXECUTOR
@NO_CACHE
def inspect(
    libraries: tuple[str, ...],
    devices: tuple[ComputeCapability, ...],
    required: tuple[ComputeCapability, ...],
    max_dead: float | None,
    deps: bool,
    kernels: bool,
    globs: tuple[str, ...],
    top: int | None,
    elements: bool,
    headers_only: bool,
    packages: bool,
    run: str | None,
    lock: Path | Url | None,
    as_json: bool,
    jobs: int | None,
    executor: str | None,
    no_cache: bool,
) -> None:
    """Show the GPU code in libraries.

    PATH is a shared library or executable, a folder, an archive (a wheel, ZIP, tar, conda
    or Debian archive), or the name of an installed distribution such as torch. By default, it
    is the active environment. PATH may also be a cubin, fatbin, PTX, LTO-IR, Tile IR or LLVM
    bitcode file, an object file or a static archive. In folders, archives and distributions, all
    such files are found by their first bytes.

    --match shapes the list of --kernels; with --json, the list has all kernels.

    With --packages, --run or --lock, the tables are by package, and show what a suite needs. PATH
    is one file tree: the root of an unpacked image, an environment of Python or conda, or an
    archive of one, such as a saved image (docker save, OCI; a folder or a tar archive) or a wheel.
    A library is one that the suite loaded if content or build id agree; paths don't matter. --arch
    then calls code for other GPUs slimmable; without it, the devices are those of the
    run or the lock. The JSON has the schema packages.

    Gates read headers alone. With --require-arch, a table counts the regions without code for an
    arch: libraries may have regions for other GPUs alone.

    Exit status: 0, or 1 if a library could not be read or a gate fails.
    """
    libraries = libraries or tuple(map(str, active_paths()))
    if packages or run is not None or lock is not None:
        others = (required, deps, kernels, elements, headers_only, globs)
        check_usage(
            (
                len(libraries) > 1 or (run is not None and lock is not None),
                "tables by package take one PATH; --run or --lock, not both",
            ),
            (
                any(others) or max_dead is not None,
                "--packages, --run and --lock are for tables by package, which only --arch, --top "
                "and --json shape",
            ),
        )
        show_packages(
            Path(libraries[0]),
            run,
            lock,
            devices,
            _ROWS if top is None else top,
            _next(libraries, devices) if Path(libraries[0]).is_dir() else None,
            as_json=as_json,
            jobs=jobs,
            executor=executor,
            no_cache=no_cache,
        )
        return
    check_usage(
        (
            max_dead is not None and not devices,
            "--max-dead needs --arch, which names the deployed GPUs",
        ),
        (
            headers_only and kernels,
            "--kernels needs the code unpacked, so not with --headers-only",
        ),
        (
            (globs and not kernels) or top is not None,
            "--match goes with --kernels, --top with --packages, --run or --lock",
        ),
    )
    has_gates = bool(required) or max_dead is not None
    request = InspectionRequest(
        devices=devices,
        kernels=kernels,
        elements=elements,
        headers_only=headers_only or (has_gates and not kernels),
        globs=globs,
        required=required,
    )
    cache = None if no_cache else open_cache(settings_of().cache_dir)
    with workers_for(executor, jobs) as workers, Progress("reading libraries") as progress:
        inspected = inspect_libraries(
            libraries,
            request.map_request,
            cache,
            workers,
            progress.update,
            with_dependencies=deps,
        )
    if as_json:
        answer(inspection_of(inspected, request), (), as_json=True)
    else:
        for number, part in enumerate(render_text(inspected, request)):
            if number:
                click.echo()
            show(part)
    for argument, one in zip(libraries, inspected, strict=True):
        if not (one.libraries.paths or one.mapped):
            note_unopened(Path(argument))
    errors: list[object] = [error for one in inspected for error in errors_of(one)]
    errors += missing_archs(inspected, required) if required else ()
    errors += too_much_dead(inspected, max_dead) if max_dead is not None else ()
    fail_for(errors)
    # An answer about one library or to a question needs no next step.
    has_code = any(m.summary and m.summary.sections for one in inspected for m in one.mapped)
    in_folders = all(Path(argument).is_dir() for argument in libraries)
    if has_code and in_folders and not (as_json or required):
        say_next(_next(libraries, devices))


def _next(libraries: Sequence[str], devices: Sequence[ComputeCapability]) -> str:
    """Without archs, only a run tells what is needed."""
    if not devices:
        return "pytest --negativa"
    archs = ",".join(f"sm_{device.major}{device.minor}" for device in devices)
    return f"negativa slim --arch {archs} --spare spares --dry-run {shlex.join(libraries)}"


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
    # With yaml, they would be a sixth of the start of every inspect.
    from pytest_negativa.images.report import load_suite, report_image, suite_of_lock
    from pytest_negativa.reporting.image import render_image_report
    from pytest_negativa.storage.lockfile import load_lock

    settings = settings_of({BY_NAME["run"].dest: run})
    suite = None
    if run is not None:
        then = f"negativa report --run {shlex.quote(run)}"
        suite = load_suite(run_of(settings))
    elif lock is not None:
        then = slim_by(lock)
        suite = suite_of_lock(load_lock(lock))
    with workers_for(executor, jobs) as workers, Progress("reading libraries") as progress:
        report = report_image(
            folder,
            suite,
            devices,
            None if no_cache else open_cache(settings.cache_dir),
            workers,
            progress.update,
        )
    if not (report.libraries or is_container(folder)):
        note_unopened(folder)
    count = len(report.unreadable)
    more = and_more(count, _MOST_ERRORS, "{} more files could not be read (see --json)")
    answer(
        report,
        render_image_report(report, top),
        as_json=as_json,
        then=then if report.libraries else None,
        errors=(*report.unreadable[:_MOST_ERRORS], *more),
    )
