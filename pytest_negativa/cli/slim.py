"""The commands that make deployments smaller: lock, slim; and explain, for errors on the result."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.cli.common import run_of, settings_of
from pytest_negativa.errors import OptionError
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.models.lock import Lock
    from pytest_negativa.models.slimming import SlimRow
    from pytest_negativa.slimming.slim import SlimReport, SlimRequest

_LOCK = "negativa.lock"
_EXIT_INTERRUPTED = 130
_GOES_ON = "what is done stays done, and the same command goes on from there"
_NOTHING = "nothing was changed"


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=_LOCK,
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--unproved",
    is_flag=True,
    help="Lock a run that is not proved, too. The lock says so, and whoever applies it is warned.",
)
@click_options("run", "config", "directory")
def lock(output: Path, unproved: bool, **flags: Any) -> None:
    """Write down what a run proved, for machines without a GPU.

    The run is one that was traced and proved (pytest --negativa --negativa-verify). The lock
    names each library by its digest, and what of its GPU code stays. Commit it beside the project's
    requirements; negativa slim applies it where an image is built.

    Exit status: 0, or 1 if the run is not proved (see --unproved) or can't be read.
    """
    from msgspec.structs import replace

    from pytest_negativa.analysis.unplanned import find_unplanned
    from pytest_negativa.installed.sites import Places
    from pytest_negativa.planning.lock import make_lock
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes, format_items
    from pytest_negativa.storage.lockfile import save_lock
    from pytest_negativa.storage.runs import load_planned, load_usage, load_verdict

    settings = settings_of(flags)
    folder = run_of(settings)
    planned = load_planned(folder)
    verdict = load_verdict(folder)
    run_id = folder.name if verdict is None else verdict.run_id
    unplanned = find_unplanned(load_usage(folder), {one.plan.library.path for one in planned})
    made = make_lock(run_id, planned, verdict, Places().of, unplanned=unplanned, unproved=unproved)
    libraries = settings.libraries
    made = replace(
        made,
        include=libraries.include,
        exclude=(*libraries.exclude, *settings.keep.libraries),
    )
    save_lock(made, output)
    unused = sum(library.unused_bytes for library in made.libraries)
    trimmed = sum(library.trimmed_bytes for library in made.libraries)
    click.echo(
        f"{output}: {format_items(len(made.libraries), 'library', 'libraries')}, "
        f"{format_bytes(unused)} of GPU code unused"
        + (f", and {format_bytes(trimmed)}, unpacked, within cubins that stay" if trimmed else "")
    )
    for row in made.left_out:
        click.echo(f"left out: {printable(row.path)}: {printable(row.reason)}")
    _warn_unproved(made)


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@click.option(
    "--site-packages",
    "site",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The same as PATH, for one folder.",
)
@click.option(
    "--lock",
    "lock_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"What stays of each library; {_LOCK} by default, if it is in the current folder.",
)
@click.option(
    "--archs",
    metavar="ARCH,...",
    help="Without a lock: keep what GPUs of these archs (sm_80,sm_90) can load, and nothing else. "
    "With --lock: do that with the other libraries of its distributions and of what they require.",
)
@click.option("--keep-ptx", is_flag=True, help="With --archs: keep all PTX, for later GPUs.")
@click.option(
    "--drop-never-loaded",
    is_flag=True,
    help="With a lock: take all GPU code out of those libraries of its distributions, and of what "
    "they require, that the proved run never loaded. If one is loaded after all, its kernels fail.",
)
@click.option(
    "--strip-others",
    is_flag=True,
    help="Drop symbol tables and debug information of libraries of which no GPU code goes, too: "
    "with a lock of its distributions and of what they require, with --archs alone of all.",
)
@click.option("--no-strip", is_flag=True, help="Keep symbol tables and debug information.")
@click.option(
    "--require",
    is_flag=True,
    help="Do nothing, and end with 1, unless all libraries of the lock are there.",
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Leave PATH as it is, and make DIR a slimmed copy of it.",
)
@click.option(
    "--keep-originals",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put the originals into DIR, for --undo.",
)
@click.option("--undo", is_flag=True, help="Put originals back that were kept.")
@click.option(
    "--check", is_flag=True, help="Tell whether slimmed libraries are still what was written."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
@click.option(
    "--no-load-check",
    is_flag=True,
    help="Don't try to load each result. For libraries of another machine type.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Libraries at a time; one for each processor by default.",
)
def slim(
    paths: tuple[Path, ...],
    site: Path | None,
    lock_file: Path | None,
    archs: str | None,
    undo: bool,
    check: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Take unused GPU code out of installed libraries: their files get smaller.

    PATH is a site-packages folder, another folder (a venv, a conda prefix), or a library; the
    packages of the interpreter that runs negativa by default. No GPU is needed. What stays is said
    by a lock (see negativa lock), whose libraries are found by digest, or by --archs. All other
    files are left alone, but for RECORD, and negativa-slim.json says what was done.

    \b
    negativa slim --lock negativa.lock --require --strip-others
    negativa slim --archs sm_90 --dry-run DIR

    Exit status: 0; 1 if a library failed or is damaged, or is not there with --require, and with
    --check also if one is gone or not what was written; 2 wrong usage; 130 if interrupted.
    """
    from pytest_negativa.slimming.slim import scan

    paths = (*paths, site) if site is not None else paths
    given = [name for name, value in options.items() if value]
    if sum((undo, check)) and (given or lock_file or archs or (check and (undo or dry_run))):
        raise click.UsageError("--undo and --check go with PATH alone (--undo with --dry-run, too)")
    if check:
        from pytest_negativa.slimming.check import check as check_tree

        with _interruptible(_NOTHING):
            rows = [row for tree in scan(paths) for row in check_tree(tree)]
        _finish_check(rows)
    elif undo:
        from pytest_negativa.slimming.undo import undo as undo_tree

        with _interruptible(_NOTHING if dry_run else _GOES_ON):
            rows = [row for tree in scan(paths) for row in undo_tree(tree, dry_run=dry_run)]
        _finish(rows, nothing="nothing here was slimmed")
    else:
        _slim(_request(paths, lock_file, archs, dry_run=dry_run, **options))


def _request(
    paths: tuple[Path, ...],
    lock_file: Path | None,
    archs: str | None,
    *,
    keep_ptx: bool,
    drop_never_loaded: bool,
    strip_others: bool,
    no_strip: bool,
    require: bool,
    target: Path | None,
    keep_originals: Path | None,
    dry_run: bool,
    no_load_check: bool,
    jobs: int | None,
) -> SlimRequest:
    from pytest_negativa.slimming.slim import SlimRequest
    from pytest_negativa.slimming.slimmer import SlimOptions

    if keep_ptx and archs is None:
        raise click.UsageError("--keep-ptx goes with --archs; a lock says which PTX stays")
    if require and archs is not None and lock_file is None:
        raise click.UsageError("--require goes with a lock")
    if drop_never_loaded and archs is not None and lock_file is None:
        raise click.UsageError("--drop-never-loaded goes with a lock, which tells what was loaded")
    if no_strip and strip_others:
        raise click.UsageError("--no-strip and --strip-others contradict each other")
    if target is not None and keep_originals is not None:
        raise click.UsageError("with --target the originals stay where they are")
    return SlimRequest(
        paths=paths,
        lock=_load_lock(lock_file) if archs is None or lock_file is not None else None,
        devices=() if archs is None else _devices(archs),
        keep_ptx=keep_ptx,
        strip_others=strip_others,
        drop_never_loaded=drop_never_loaded,
        require=require,
        target=target,
        options=SlimOptions(
            strip=not no_strip,
            load_check=not no_load_check,
            dry_run=dry_run,
            keep_originals=None if keep_originals is None else keep_originals.absolute(),
            jobs=jobs or len(os.sched_getaffinity(0)),
        ),
    )


def _slim(request: SlimRequest) -> None:
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.slimming.licence_notice import show_notice
    from pytest_negativa.slimming.slim import slim as slim_libraries

    if request.lock is not None:
        _warn_unproved(request.lock)
    show_notice(lambda text: click.echo(text, err=True))
    nothing = request.options.dry_run or request.target is not None
    with (
        _interruptible(_NOTHING if nothing else _GOES_ON),
        ByteProgress("slimming") as progress,
    ):
        report = slim_libraries(request, progress.update)
    _finish(report.rows, report)


@contextlib.contextmanager
def _interruptible(text: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with a line that says how things are."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"negativa: interrupted: {text}", err=True)
        sys.stdout.flush()
        # Not by an exception: Python would wait for the threads that are in a library still.
        os._exit(_EXIT_INTERRUPTED)


def _load_lock(path: Path | None) -> Lock:
    from pytest_negativa.storage.lockfile import load_lock

    if path is None and not Path(_LOCK).exists():
        raise click.UsageError(
            f"no {_LOCK} here: give --lock, or --archs to keep what GPUs of some archs can load"
        )
    return load_lock(path or Path(_LOCK))


def _devices(archs: str) -> tuple[ComputeCapability, ...]:
    from pytest_negativa.arch import ComputeCapability

    try:
        found = [ComputeCapability.parse(arch.strip()) for arch in archs.split(",")]
    except OptionError as e:
        raise click.BadParameter(str(e), param_hint="--archs") from e
    return tuple(dict.fromkeys(found))


def _warn_unproved(lock: Lock) -> None:
    from pytest_negativa.reporting.text import printable

    if not lock.proof.proved:
        reasons = printable("; ".join(lock.proof.not_proved))
        click.echo(f"negativa: warning: this lock is NOT PROVED: {reasons}", err=True)


def _finish(
    rows: Sequence[SlimRow], report: SlimReport | None = None, *, nothing: str = "nothing to slim"
) -> None:
    """Print, and leave with the status that follows."""
    from pytest_negativa.models.slimming import PROBLEMS
    from pytest_negativa.reporting.slimming import render_problems, render_rows

    if text := render_rows(rows, nothing):
        click.echo(text)
    for line in render_problems(rows):
        click.echo(f"negativa: error: {line}", err=True)
    if report is not None and report.stopped:
        click.echo(
            "negativa: error: nothing was done, for not all libraries of the lock are there",
            err=True,
        )
    if any(row.status in PROBLEMS for row in rows) or (report is not None and report.stopped):
        click.get_current_context().exit(1)


def _finish_check(rows: Sequence[SlimRow]) -> None:
    from pytest_negativa.models.slimming import PROBLEMS
    from pytest_negativa.reporting.slimming import render_check, render_problems

    if text := render_check(rows):
        click.echo(text)
    for line in render_problems(rows):
        click.echo(f"negativa: error: {line}", err=True)
    if any(row.status in PROBLEMS for row in rows):
        click.get_current_context().exit(1)


@click.command()
@click.argument("error", required=False, default="")
@click.option(
    "--in",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The packages of the program that failed; this interpreter's by default.",
)
def explain(error: str, folders: tuple[Path, ...]) -> None:
    """Say whether slimmed libraries can be the cause of a CUDA ERROR, and what to do.

    ERROR is the message, as "CUDA error: no kernel image is available for execution on the
    device". In a Python program: print(pytest_negativa.why(exception))
    """
    from pytest_negativa.slimming.explain import explain as explain_error
    from pytest_negativa.slimming.explain import slimmed_in
    from pytest_negativa.slimming.slim import default_paths

    asked = folders or default_paths()
    click.echo(explain_error(error, slimmed_in(asked), asked))


COMMANDS = (lock, slim, explain)
