"""``negativa slim``, ``undo``, ``check``: options, the question, ways back, the exit status."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.common import (
    ARCH_LIST,
    JOBS,
    LOCK,
    LOCK_FILE,
    PATHS,
    YES,
    active_paths,
    answer,
    as_json_option,
    as_words,
    check_usage,
    confirm,
    parse_devices,
    settings_of,
    show,
    show_proof,
)
from pytest_negativa.cli.main import ended_by_signals
from pytest_negativa.errors import ExitStatus, OptionError, UnknownArch, did_you_mean
from pytest_negativa.images.archive_kinds import is_wheel
from pytest_negativa.models.base import Listing
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.slimming import UNMET, SlimRow, SlimStatus
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.slimming import render_holes, render_problems, render_rows
from pytest_negativa.reporting.text import printable
from pytest_negativa.settings.flags import click_options
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.package import slim_wheel
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import MOST_HOLES, SpareTarget
from pytest_negativa.slimming.tree import refuse_other_files, roots_of, scan
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.system import available_cores

GOES_ON = "what is done stays done, and the same command goes on from there"
NOTHING = "nothing was changed"

_CHANGED = (SlimStatus.SLIMMED, SlimStatus.WOULD_SLIM, SlimStatus.ALREADY)

_dry_run = click.option("--dry-run", is_flag=True, help="Report what would change; write nothing.")


@click.command()
@PATHS
@click.option(
    "--lock",
    "lock_file",
    type=LOCK_FILE,
    metavar="FILE|URL",
    help=f"Read from this lock what stays. (default without --arch: {LOCK})",
)
@click.option(
    "--arch",
    "archs",
    metavar=ARCH_LIST,
    multiple=True,
    help="Keep what GPUs of these archs can load (sm_80,H100).",
)
@click.option(
    "--force-arch",
    is_flag=True,
    help="Take archs that this release does not know.",
)
@click.option("--keep-ptx", is_flag=True, help="Keep all PTX, for later GPUs (with --arch).")
@click.option(
    "--never-loaded",
    is_flag=True,
    help="Remove code of libraries that no test loaded: with --spare, all of it.",
)
@click.option("--strip-others", is_flag=True, help="Strip also libraries that lose no GPU code.")
@click.option("--no-strip", is_flag=True, help="Keep symbol tables and debug information.")
@click.option(
    "--require",
    is_flag=True,
    help="Do nothing if a library of the lock is missing or another file.",
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write a smaller wheel into DIR.",
)
@click.option(
    "--keep-originals",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the originals in DIR, for negativa slim undo.",
)
@click.option(
    "--spare",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put removed code into DIR: it comes back when it is used.",
)
@click.option(
    "--spare-holes",
    metavar="N",
    type=click.IntRange(min=1),
    help=f"Make at most N holes in all libraries. (default: {MOST_HOLES:,})",
)
@click.option("--no-way-back", is_flag=True, help="Keep neither originals nor a spare.")
@YES
@_dry_run
@JOBS
@as_json_option("slim")
@click_options("reports.top")
def slim(as_json: bool, **flags: Any) -> None:
    """Remove unused code from installed libraries.

    Their files get smaller. PATH is a site-packages folder, another folder (a venv, a conda
    prefix), a library, or a wheel (with --target). By default, it is the active environment, if one
    is active. slim needs no GPU.

    --spare or --keep-originals keeps a way back, for slim undo; --no-way-back needs none, as in an
    image that is built anew. One of them is required, except with --dry-run and --target. On a
    terminal, slim asks before it changes PATH. Where negativa itself is installed, slim leaves
    libcupti and the libraries that negativa needs as they are.

    A lock (see negativa lock) or --arch says what GPU code stays. slim finds the libraries of a
    lock by digest. With both, --arch applies to the other libraries of the lock's distributions and
    of the distributions that these require. So do --strip-others and, without --spare,
    --never-loaded. slim changes no other files, except RECORD, and lists what it did in
    negativa-slim.json. Without --spare, it also removes cubin, fatbin and PTX files: those that the
    lock has as unused or, with --arch and without a lock, that no such GPU can load. Run undo
    before you uninstall a distribution: pip leaves the added files.

    With --spare, removed code lies in a spare and comes back when a program uses it: see
    negativa help spares. So do CPU code and data that the run of the lock never used, if it
    was traced with --cpu or --negativa-cpu. The library looks for its spare in DIR, then beside
    itself, then in NEGATIVA_SPARE_DIR. Without its spare the library can't be loaded, and the error
    names the spare. A library that has a spare is slimmed anew only with --spare or
    --keep-originals. --never-loaded then concerns all libraries of PATH that the lock does not
    know by content or name. Their code comes back, too, so the lock need not be proved.

    As root, slim refuses folders that other users can write to, unless NEGATIVA_NO_OTHER_USERS=1
    says that nobody else can get in, as in an image build.

    The licence of a library may limit who may pass the smaller file on: see
    negativa help licences.

    A library that would lose less than 65.5 kB stays unchanged. A library that --never-loaded
    emptied fails with a CUDA error if a program loads it.

    \b
    negativa slim --arch sm_90 --spare spares
    negativa slim --lock negativa.lock --require --strip-others --no-way-back
    negativa slim --arch sm_90 --dry-run DIR

    Of a folder that has the name of a command, such as undo, write ./undo.

    Exit status: 0; 1 if a library failed or is damaged, or is missing with --require, or if there
    was nothing to work on; 2 wrong usage; 128 + N if signal N interrupted it.
    """
    settings = settings_of(flags)
    request = _request(SimpleNamespace(**flags))
    is_copy = request.target is not None or any(map(is_wheel, request.paths))
    if not (is_copy or request.options.dry_run):
        _check_change(request, no_way_back=flags["no_way_back"], yes=flags["yes"])
    _slim(request, top=settings.reports.top, as_json=as_json)


@click.command()
@PATHS
@YES
@_dry_run
@as_json_option("slim")
@click_options("reports.top")
def slim_undo(
    paths: tuple[Path, ...], yes: bool, dry_run: bool, as_json: bool, **flags: Any
) -> None:
    """Put back the originals.

    --keep-originals kept them, or the libraries and their spares give them back (--spare). The
    spares go afterwards: a copy of the folder needs a copy of its spares.

    PATH is a folder or a library that was slimmed; by default, the active environment, if
    one is active. On a terminal, undo asks before it changes PATH.

    Exit status: 0; 1 if an original is gone; 2 wrong usage; 128 + N if
    signal N interrupted it.
    """
    top = settings_of(flags).reports.top
    paths = paths or active_paths(or_own=False)
    confirm(f"put the originals back in {named_paths(*paths)}", yes=yes or dry_run)
    with (
        ended_by_signals(NOTHING if dry_run else GOES_ON),
        Progress("putting originals back") as progress,
    ):
        rows = undo_trees(paths, dry_run=dry_run, on_done=progress.update)
    print_rows(
        rows,
        f"nothing was slimmed in {named_paths(*paths)}",
        top=top,
        as_json=as_json,
        then=f"negativa inspect {as_words(paths)}",
    )


@click.command()
@PATHS
@click.option(
    "--require",
    is_flag=True,
    help="Fail also if a library is another file or its spare is not here.",
)
@as_json_option("slim")
@click_options("reports.top")
def slim_check(paths: tuple[Path, ...], require: bool, as_json: bool, **flags: Any) -> None:
    """Check that slimmed libraries are still what slim wrote.

    Of a library with a spare, check opens the spare as the library would, as this user, and reads
    every byte of both: together they must give the original. It says what would be refused, so run
    it before a container starts its program. If the spare is not here, such as in an image that
    leaves it behind, check says so.

    PATH is a folder or a library; by default, the active environment.

    Exit status: 0; 1 if a library is damaged, gone, or not what slim wrote, if nothing was slimmed,
    or by --require; 2 wrong usage; 128 + N if signal N interrupted it.
    """
    top = settings_of(flags).reports.top
    paths = paths or active_paths()
    with ended_by_signals(NOTHING), Progress("checking libraries") as progress:
        rows = [row for tree in scan(paths) for row in check_tree(tree, progress.update)]
    nothing = f"nothing was slimmed in {named_paths(*paths)}: nothing was checked"
    is_sound = all(row.status is SlimStatus.SOUND for row in rows)
    then = f"negativa slim undo {as_words(paths)}, to have the originals back" if is_sound else None
    print_rows(
        rows,
        "",
        top=top,
        as_json=as_json,
        failure=None if rows else nothing,
        then=then,
    )
    if require and any(row.status in UNMET for row in rows):
        click.get_current_context().exit(ExitStatus.FAILED)


def _request(flags: SimpleNamespace) -> SlimRequest:
    """The request of the options, which have click's names."""
    first = str(flags.paths[0]) if flags.paths else ""
    wheels = any(map(is_wheel, flags.paths))
    is_word = first.isalpha() and not os.path.lexists(first)
    if is_word and (near := did_you_mean(first, ("check", "undo"))):
        raise click.UsageError(f"{first}: neither a path nor a subcommand{near}")
    refuse_other_files([path for path in flags.paths if not is_wheel(path)])
    by_lock = flags.lock_file is not None or not flags.archs
    contradictions = (
        (flags.force_arch, flags.archs, "--force-arch goes with --arch"),
        (flags.keep_ptx, flags.archs, "--keep-ptx goes with --arch; a lock says which PTX stays"),
        (flags.require, by_lock, "--require goes with a lock"),
        (
            flags.never_loaded,
            by_lock,
            "--never-loaded goes with a lock, which tells what was loaded",
        ),
        (flags.no_strip, not flags.strip_others, "--no-strip and --strip-others contradict"),
        (
            flags.no_way_back,
            flags.keep_originals is None and (flags.spare is None or flags.strip_others),
            "--no-way-back contradicts --spare and --keep-originals; leave one out",
        ),
        (
            flags.spare,
            not flags.no_strip,
            "--spare: symbol tables and debug information go into the spare with the code; leave "
            "out --no-strip",
        ),
        (flags.spare_holes, flags.spare is not None, "--spare-holes goes with --spare"),
        (flags.target, flags.keep_originals is None, "--target does not change the wheel"),
        (
            flags.target,
            wheels,
            "--target takes a wheel; to keep a folder unchanged, copy it "
            "(cp -a PATH COPY) and slim the copy",
        ),
        (
            wheels,
            len(flags.paths) == 1,
            "slim takes one wheel at a time, and nothing beside it",
        ),
        (
            wheels,
            flags.target,
            "a wheel needs --target DIR, the folder for the smaller wheel",
        ),
        (wheels, flags.spare is None, "--spare takes installed libraries, not wheels"),
        (
            by_lock,
            flags.lock_file is not None or Path(LOCK).is_file(),
            f"no {LOCK} here: give --lock, or --arch to keep what GPUs of some archs can load",
        ),
    )
    check_usage(*((given and not allowed, rule) for given, allowed, rule in contradictions))
    lock = load_lock(flags.lock_file or Path(LOCK)) if by_lock else None
    return SlimRequest(
        paths=flags.paths or active_paths(or_own=False),
        lock=lock,
        devices=_devices(flags.archs, force=flags.force_arch),
        keep_ptx=flags.keep_ptx,
        strip_others=flags.strip_others,
        never_loaded=flags.never_loaded,
        require=flags.require,
        target=flags.target,
        options=SlimOptions(
            strip=not flags.no_strip,
            dry_run=flags.dry_run,
            keep_originals=flags.keep_originals and absolute(flags.keep_originals),
            spare=None
            if flags.spare is None
            else SpareTarget(absolute(flags.spare), flags.spare_holes or MOST_HOLES),
            jobs=flags.jobs or available_cores(),
        ),
    )


def _check_change(request: SlimRequest, *, no_way_back: bool, yes: bool) -> None:
    """Require a way back, and ask."""
    roots_of(request.paths)  # A path that is not there is told of first.
    options = request.options
    # A spare has nothing of the libraries that are stripped alone.
    has_spare = options.spare is not None and not request.strip_others
    or_spare = "" if request.strip_others else "--spare DIR or "
    check_usage(
        (
            not (has_spare or options.keep_originals is not None or no_way_back),
            f"give {or_spare}--keep-originals DIR, so that what is removed can come back, or "
            "--no-way-back",
        )
    )
    confirm(f"slim the libraries in {named_paths(*request.paths)}", yes=yes)


def _slim(request: SlimRequest, *, top: int, as_json: bool) -> None:
    if request.lock is not None:
        show_proof(request.lock, takes_cpu_code=request.options.spare is not None)
    unchanged = request.options.dry_run or request.target is not None
    with (
        ended_by_signals(NOTHING if unchanged else GOES_ON),
        Progress("slimming") as progress,
    ):
        if any(map(is_wheel, request.paths)):
            report = slim_wheel(request, progress.update)
            assert request.target is not None
            [wheel] = request.paths
            if (new := request.target / wheel.name).exists():
                sizes = (format_bytes(path.stat().st_size) for path in (wheel, new))
                show(
                    f"negativa: {printable(str(new))}: {' -> '.join(sizes)}; check the licences of "
                    "its libraries before you pass it on",
                    err=True,
                )
        else:
            report = slim_trees(request, progress.update)
    _show_ways_back(request, report)
    reason = _why_nothing(request, report)
    nothing_to_do = "" if reason else f"nothing to slim in {named_paths(*request.paths)}"
    then: str | None = f"negativa slim check {as_words(request.paths)}"
    if not any(row.status in _CHANGED for row in report.rows):
        then = None
    elif request.options.dry_run:
        then = "the same command without --dry-run"
    elif request.target is not None:
        made = [request.target / path.name for path in request.paths]
        then = f"negativa inspect {as_words(made)}"
    print_rows(
        report.rows,
        nothing_to_do,
        top=top,
        as_json=as_json,
        failure=reason,
        then=then,
    )


def _why_nothing(request: SlimRequest, report: SlimReport) -> str | None:
    """The reason that no library was slimmed, for an error; None if there was work."""
    where = named_paths(*request.paths)
    if report.stopped:
        return "nothing was done: not all libraries of the lock are here"
    # A wheel without GPU code becomes a copy: all of an environment may go through slim.
    if any(map(is_wheel, request.paths)):
        return None
    # A distribution has a row for each site with another version of it.
    unmet = all(row.status in UNMET - {SlimStatus.SPARE_AWAY} for row in report.rows)
    wanted = (
        0 if request.lock is None else len(request.lock.gpu_libraries) + len(request.lock.files)
    )
    if unmet and len(report.rows) >= max(wanted, 1):
        return f"nothing of the lock is in {where}: is it the lock of another environment?"
    if report.rows:
        return None
    what = (
        "no library has GPU code"
        if request.lock is None
        else "the lock has CPU code alone"
        if request.lock.has_pages and request.options.spare is None and not wanted
        else "nothing of the lock is there"
    )
    if any(is_wheel(inner) for path in request.paths for inner in path.glob("*")):
        what += "; the wheels there were not opened: pass each by its own path, with --target"
    return f"nothing to slim in {where}: {what}"


def _show_ways_back(request: SlimRequest, report: SlimReport) -> None:
    if not any(row.status is SlimStatus.SLIMMED for row in report.rows):
        return
    undo = f"negativa slim undo {printable(as_words(request.paths))}"
    aside, spare = request.options.keep_originals, request.options.spare
    if aside is not None:
        show(
            f"negativa: {printable(str(aside))} has the originals; {undo} puts them back", err=True
        )
    if spare is not None and any(spare.folder.glob("*.spare")):
        show(
            f"negativa: {printable(str(spare.folder))} has what was removed; {undo} puts it back",
            err=True,
        )
        if (cost := render_holes(report.holes, report.min_hole)) is not None:
            show(f"negativa: {cost}", err=True)


def _devices(archs: Sequence[str], *, force: bool) -> tuple[ComputeCapability, ...]:
    try:
        return parse_devices(archs, also_unknown=force)
    except OptionError as e:
        # Of a mistyped arch, all code for the GPUs that are there could go.
        hint = " (--force-arch takes it as it is)" if isinstance(e, UnknownArch) else ""
        raise click.BadParameter(f"{e}{hint}", param_hint="--arch") from None


def absolute(folder: Path) -> Path:
    """The path from the root, by way of no folder that may move.

    Links stay in it: programs find spares by the name that was given.
    """
    return Path(os.path.realpath(folder)) if ".." in folder.parts else folder.absolute()


def named_paths(*paths: Path) -> str:
    return ", ".join(dict.fromkeys(printable(str(path)) for path in paths))


def print_rows(
    rows: Sequence[SlimRow],
    nothing: str,
    *,
    top: int,
    as_json: bool,
    failure: str | None = None,
    then: str | None = None,
) -> None:
    """Print, and leave with the status that follows.

    Args:
        rows: of all libraries.
        nothing: the text if there are no rows.
        top: rows of each table; 0 for all.
        as_json: print JSON.
        failure: why nothing was done, which is an error.
        then: the next command, if all went well.
    """
    answer(
        Listing(rows=tuple(rows)),
        [render_rows(rows, nothing, top=top)],
        as_json=as_json,
        then=then if rows else None,
        errors=filter(None, (*render_problems(rows), failure)),
    )
