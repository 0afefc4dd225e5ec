"""The commands that make deployments smaller: lock, slim, and explain for errors on the result."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pytest_negativa.cli.common import (
    ARCH_LIST,
    FOLDER,
    PathOrUrl,
    as_json_option,
    encode_json,
    interruptible,
    named_run,
    parse_devices,
    run_of,
    settings_of,
    show,
)
from pytest_negativa.errors import NegativaError, OptionError, StoreError, UnknownArch, did_you_mean
from pytest_negativa.images.archive_kinds import WHEEL_SUFFIX
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.urls import Url

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.models.lock import Lock
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.models.slimming import Origin, SlimRow
    from pytest_negativa.slimming.prune import Spares
    from pytest_negativa.slimming.slim import SlimReport, SlimRequest
    from pytest_negativa.slimming.spares import SparePolicy

_LOCK = "negativa.lock"
_COMPACTED = "compacted"
_GOES_ON = "what is done stays done, and the same command goes on from there"
_NOTHING = "nothing was changed"


@click.command()
@click.option(
    "-o",
    "--output",
    type=PathOrUrl(path_type=Path),
    default=_LOCK,
    help=f"Write the lock to this file or URL; - is standard output. (default: {_LOCK})",
)
@click.option(
    "--unproved",
    is_flag=True,
    help="Lock a run even if it is not proved; slim warns of such a lock.",
)
@click.option(
    "--add-misses",
    "logs",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="LOG",
    help="Widen the lock in --output by what came back, instead of locking a run.",
)
@click.option(
    "--add-uses",
    "used",
    multiple=True,
    metavar="RUN",
    help="Widen the lock in --output by what this run used, such as samples.",
)
@click.option(
    "--in",
    "folders",
    multiple=True,
    type=FOLDER,
    metavar="DIR",
    help="Search the libraries of --add-misses here, not in this interpreter's.",
)
@click_options("run", "config", "directory")
def lock(
    output: Path | Url,
    unproved: bool,
    logs: tuple[Path, ...],
    used: tuple[str, ...],
    folders: tuple[Path, ...],
    **flags: Any,
) -> None:
    """Lock what a run proved, for machines without a GPU.

    The run was traced and proved (pytest --negativa --negativa-verify). The lock names each library
    by its digest and lists the GPU code that stays. Commit it beside the project's requirements;
    negativa slim applies it when an image is built.

    With --add-misses, the lock keeps the GPU code that came back to libraries that were slimmed
    with a spare. LOG is a log, or a folder of logs: see negativa misses. What the lock removes is
    still what was proved, or less. With --add-uses, it keeps what another run used, such as the
    samples of a service: see negativa trace --attach-env. The same holds for what it removes.

    Exit status: 0, or 1 if the run is not proved (see --unproved) or can't be read.
    """
    if logs and used:
        raise click.UsageError("--add-misses and --add-uses: give one of them")
    if logs:
        _widen(output, logs, folders)
        return
    if folders:
        raise click.UsageError("--in goes with --add-misses")
    if used:
        _widen_by_use(output, used, settings_of(flags))
        return
    from pytest_negativa.analysis.unplanned import find_unplanned
    from pytest_negativa.installed.sites import Places
    from pytest_negativa.planning.lock import make_lock, why_files_stay
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes, format_items
    from pytest_negativa.storage.lockfile import save_lock
    from pytest_negativa.storage.output import STDOUT
    from pytest_negativa.storage.results import (
        load_files_plans,
        load_planned,
        load_usage,
        load_verdict,
    )

    settings = settings_of(flags)
    run = run_of(settings)
    if (reason := run.partial_reason) is not None:
        raise StoreError(f"{run}: not locked: {reason}; combine runs of all shards")
    planned = load_planned(run)
    verdict = load_verdict(run)
    run_id = run.run_id if verdict is None else verdict.run_id
    unplanned = find_unplanned(load_usage(run), [one.plan.library for one in planned])
    files_plans = load_files_plans(run)
    places = Places()
    made = make_lock(
        run_id,
        planned,
        verdict,
        lambda path: places.from_folder(path, Path.cwd()),
        unplanned=unplanned,
        unproved=unproved,
        include=settings.libraries.include,
        exclude=(*settings.libraries.exclude, *settings.keep.libraries),
        files=files_plans,
    )
    save_lock(made, output)
    to_stdout = str(output) == STDOUT
    unused = sum(library.unused_bytes for library in made.libraries)
    trimmed = sum(library.trimmed_bytes for library in made.libraries)
    click.echo(
        f"{printable(str(output))}: {format_items(len(made.libraries), 'library', 'libraries')}, "
        f"{format_bytes(unused)} of GPU code unused"
        + (f", and {format_bytes(trimmed)}, unpacked, within cubins that stay" if trimmed else ""),
        err=to_stdout,
    )
    for files in made.files:
        count = format_items(files.files - files.kept_files, "file", "files")
        click.echo(
            f"{printable(files.distribution)} {printable(files.version)}: {count} of GPU code "
            f"({format_bytes(files.unused_bytes)}) unused",
            err=to_stdout,
        )
    locked = {files.record_sha256 for files in made.files}
    for plan in files_plans:
        reason = why_files_stay([plan], verdict)
        if plan.digest not in locked and reason is not None:
            name = printable(f"{plan.distribution} {plan.version}")
            click.echo(f"left out: files of {name}: {printable(reason)}", err=to_stdout)
    for row in made.left_out:
        click.echo(f"left out: {printable(row.path)}: {printable(row.reason)}", err=to_stdout)
    _show_proof(made)


def _widen(path: Path | Url, logs: tuple[Path, ...], folders: tuple[Path, ...]) -> None:
    """Keep in the lock what came back."""
    from pytest_negativa.analysis.widen import widen_lock
    from pytest_negativa.hostcode.page_logs import read_misses
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_items
    from pytest_negativa.slimming.slim import default_paths
    from pytest_negativa.storage.lockfile import load_lock, save_lock

    done = widen_lock(load_lock(path), read_misses(logs), folders or default_paths())
    save_lock(done.lock, path)
    for name, count in done.added.items():
        elements = format_items(count, "element that came back", "elements that came back")
        click.echo(f"{printable(name)}: keeps {elements}")
    if not done.added:
        click.echo(printable(f"{path}: nothing of what it removes came back"))
    for name in done.not_locked:
        click.echo(
            f"{printable(name)}: came back in part, and is not in the lock; negativa slim keeps "
            "what came back with --add-misses, beside --spare-never-loaded or --cpu-pages"
        )


def _widen_by_use(path: Path | Url, names: tuple[str, ...], settings: Settings) -> None:
    """Keep in the lock what other runs used."""
    from pytest_negativa.analysis.widen import widen_by_use
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_items
    from pytest_negativa.storage.lockfile import load_lock, save_lock
    from pytest_negativa.storage.results import load_opened
    from pytest_negativa.tracing.merge import merge_when_ended

    runs = [named_run(name, settings) for name in names]
    traces = [trace for run in runs for trace in run.require_traces()]
    found = filter(None, map(load_opened, runs))
    opened = [one for files in found for one in files.distributions]
    done = widen_by_use(load_lock(path), merge_when_ended(lambda: traces), settings, opened)
    save_lock(done.lock, path)
    for name, count in done.added.items():
        elements = format_items(count, "element that was used", "elements that were used")
        click.echo(f"{printable(name)}: keeps {elements}")
    for name, more in done.files.items():
        kept = "all of its files: nothing tells which were used"
        if more is not None:
            kept = format_items(more, "file that was used", "files that were used")
        click.echo(f"{printable(name)}: keeps {kept}")
    if not (done.added or done.files):
        click.echo(printable(f"{path}: nothing of what it removes was used"))


class _Flags(NamedTuple):
    """The options of ``negativa slim``, by click's names."""

    paths: tuple[Path, ...]
    lock_file: Path | Url | None
    archs: tuple[str, ...]
    force_arch: bool
    keep_ptx: bool
    drop_never_loaded: bool
    spare_never_loaded: bool
    strip_others: bool
    no_strip: bool
    require: bool
    target: Path | None
    keep_originals: Path | None
    spare: Path | None
    cpu_pages: Path | None
    logs: tuple[Path, ...]
    dry_run: bool
    no_load_check: bool
    jobs: int | None


class _SlimGroup(click.Group):
    """A first word that is exactly the name of a subcommand is that; any other is a PATH."""

    # As a command has them: options may follow a PATH.
    allow_interspersed_args = True
    allow_extra_args = False

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        word = args[0] if args else ""
        known = word.startswith("-") or word in self.commands or os.path.lexists(word)
        if not known and (near := did_you_mean(word, self.commands)):
            here = click.Context(self, parent, info_name)
            raise click.UsageError(f"{word}: neither a path nor a subcommand{near}", here)
        for name, command in self.commands.items():
            if args[:1] == [name]:
                return command.make_context(f"{info_name} {name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)


_paths = click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
_dry_run = click.option("--dry-run", is_flag=True, help="Report what would change; write nothing.")


@click.group(cls=_SlimGroup, invoke_without_command=True, subcommand_metavar="")
@_paths
@click.option(
    "--lock",
    "lock_file",
    type=PathOrUrl(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE|URL",
    help=f"Read from this lock what stays. (default without --arch: {_LOCK})",
)
@click.option(
    "--arch",
    "archs",
    metavar=ARCH_LIST,
    multiple=True,
    help="Keep what GPUs of these archs can load (sm_80,sm_90).",
)
@click.option(
    "--force-arch",
    is_flag=True,
    help="Take archs that this release or a library's CUDA does not know.",
)
@click.option("--keep-ptx", is_flag=True, help="Keep all PTX, for later GPUs (with --arch).")
@click.option(
    "--drop-never-loaded",
    is_flag=True,
    help="Remove all GPU code of libraries that the proved run never loaded.",
)
@click.option(
    "--spare-never-loaded",
    is_flag=True,
    help="Put all code of libraries that no test loaded into the spare.",
)
@click.option("--strip-others", is_flag=True, help="Strip also libraries that lose no GPU code.")
@click.option("--no-strip", is_flag=True, help="Keep symbol tables and debug information.")
@click.option(
    "--require", is_flag=True, help="Do nothing unless all libraries of the lock are there."
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Make DIR a slimmed copy of PATH, or write a smaller wheel into DIR.",
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
    "--cpu-pages",
    metavar="RUN",
    type=click.Path(exists=True, path_type=Path),
    help="Put CPU code there, too, that this run never touched.",
)
@click.option(
    "--add-misses",
    "logs",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="LOG",
    help="Keep code that came back, too (see negativa misses).",
)
@_dry_run
@click.option(
    "--no-load-check",
    is_flag=True,
    help="Do not load the results; for libraries of another machine type.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Process N libraries at a time. (default: one per processor)",
)
@as_json_option("slim")
def slim(as_json: bool, **flags: Any) -> None:
    """Remove unused GPU code from installed libraries.

    Their files get smaller. PATH is a site-packages folder, another folder (a venv, a conda
    prefix), a library, or a wheel (with --target). Without PATH, slim takes the packages of the
    interpreter that runs negativa. It needs no GPU.

    A lock (see negativa lock) or --arch says what stays. slim finds the libraries of a lock by
    digest. With both, --arch applies to the other libraries of the lock's distributions and of
    the distributions that these require. So do --drop-never-loaded and --strip-others. slim
    changes no other files, except RECORD, and lists what it did in negativa-slim.json. Without
    --spare, it also removes cubin, fatbin and PTX files: those that the lock has as unused or, with
    --arch and without a lock, that no such GPU can load. Run undo before you uninstall a
    distribution: pip leaves the added files.

    With --spare, removed code lies in a spare and comes back when a program uses it: see
    docs/explanation/spares.md. The library looks for its spare in DIR, then beside itself, then in
    NEGATIVA_SPARE_DIR. Without its spare the library can't be loaded, and the error names the
    spare. A library that has a spare keeps one, also without --spare, unless --keep-originals is
    passed.
    RUN is a folder of a run that was traced with --cpu or --negativa-cpu, or its cpu.json. LOG is
    a log of what came back, or a folder of logs. --spare-never-loaded concerns all libraries of
    PATH that neither the lock nor RUN knows by content or name. Their code comes back, too, so the
    lock need not be proved.

    As root, slim refuses folders that other users can write to, unless NEGATIVA_NO_OTHER_USERS=1
    says that nobody else can get in, as in an image build.

    A library that would lose less than 65.5 kB stays unchanged. A library that --drop-never-loaded
    emptied fails with a CUDA error if a program loads it.

    \b
    negativa slim --arch sm_90 --spare spares
    negativa slim --lock negativa.lock --require --strip-others
    negativa slim --arch sm_90 --dry-run DIR

    Of a folder that has the name of a command, such as undo, write ./undo.

    Exit status: 0; 1 if a library failed or is damaged, or is missing with --require, or if there
    was nothing to work on; 2 wrong usage; 128 + N if signal N interrupted it.
    """
    _slim(_request(_Flags(**flags)), as_json=as_json)


@slim.command("undo")
@_paths
@_dry_run
@as_json_option("slim")
def slim_undo(paths: tuple[Path, ...], dry_run: bool, as_json: bool) -> None:
    """Put back the originals.

    --keep-originals kept them, or the libraries and their spares give them back (--spare). The
    spares stay, because other folders may use them: see negativa slim prune.

    PATH is a folder or a library that was slimmed; by default, the packages of the interpreter
    that runs negativa.

    Exit status: 0; 1 if an original is gone; 2 wrong usage; 128 + N if
    signal N interrupted it.
    """
    from pytest_negativa.slimming.undo import undo_trees

    spares: set[Path] = set()
    with interruptible(_NOTHING if dry_run else _GOES_ON):
        rows = undo_trees(paths, dry_run=dry_run, on_spares=spares.update)
    _show_left_spares(spares)
    _finish(rows, f"nothing was slimmed in {_places(*paths)}", as_json=as_json)


@slim.command("check")
@_paths
@click.option(
    "--require",
    is_flag=True,
    help="Fail also if a library is another file or its spare is not here.",
)
@as_json_option("slim")
def slim_check(paths: tuple[Path, ...], require: bool, as_json: bool) -> None:
    """Check that slimmed libraries are still what slim wrote.

    A library with a spare and its spare must give the original back: check reads every byte of
    both, so run it before a container starts its program. If the spare is not here, such as in an
    image that leaves it behind, check says so.

    PATH is a folder or a library; by default, the packages of the interpreter that runs negativa.

    Exit status: 0; 1 if a library is damaged, gone, or not what slim wrote, if nothing was slimmed
    or slim is at work there, or by --require; 2 wrong usage; 128 + N if signal N interrupted it.
    """
    from pytest_negativa.slimming.check import check_tree
    from pytest_negativa.slimming.slim import scan

    with interruptible(_NOTHING):
        rows = [row for tree in scan(paths) for row in check_tree(tree)]
    nothing = f"nothing was slimmed in {_places(*paths)}"
    reason = None if rows else f"{nothing}: nothing was checked"
    _finish(rows, "", as_json=as_json, checked=True, require=require, nothing_done=reason)


@slim.command("push")
@click.argument("url")
@_paths
@as_json_option("slim")
def slim_push(url: str, paths: tuple[Path, ...], as_json: bool) -> None:
    """Send spares to URL, such as s3://bucket/spares.

    negativa-slim.json in each slimmed folder keeps the URL, for negativa slim fetch. Spares that
    are there are not sent again. Several folders may use one URL.

    PATH is a folder or a library that was slimmed with --spare; by default, the packages of the
    interpreter that runs negativa.

    Exit status: 0; 1 if a spare is missing or damaged, or can't be sent; 2 wrong usage; 128 + N if
    signal N interrupted it.
    """
    from pytest_negativa.slimming.remote_spares import push_spares

    with interruptible(_GOES_ON):
        rows = push_spares(paths, Url(url))
    _finish(rows, f"no library with a spare in {_places(*paths)}", as_json=as_json, checked=True)


@slim.command("fetch")
@_paths
@click.option(
    "--spare",
    "folder",
    metavar="DIR",
    envvar="NEGATIVA_SPARE_DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Put spares into DIR. (default: NEGATIVA_SPARE_DIR)",
)
@as_json_option("slim")
def slim_fetch(paths: tuple[Path, ...], folder: Path, as_json: bool) -> None:
    """Fetch the spares that libraries lack.

    They come from the URL of negativa slim push. Run it before the program starts: a library looks
    for its spare when it is loaded. A spare is taken only if it gives the original back, by its
    digest.

    PATH is a folder or a library that was slimmed with --spare; by default, the packages of the
    interpreter that runs negativa.

    Exit status: 0; 1 if a spare can't be fetched; 2 wrong usage; 128 + N if signal N interrupted
    it.
    """
    from pytest_negativa.slimming.remote_spares import fetch_spares

    with interruptible(_GOES_ON):
        rows = fetch_spares(paths, _absolute(folder))
    _finish(rows, f"no spare to fetch in {_places(*paths)}", as_json=as_json, checked=True)


@slim.command("prune")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@_paths
@_dry_run
@click.option("--force", is_flag=True, help="Remove them although a library may need them.")
def slim_prune(folder: Path, paths: tuple[Path, ...], dry_run: bool, force: bool) -> None:
    """Remove spares in DIR that no library needs.

    They are of earlier slims, and of libraries that undo put back. Spares stay that a library in
    PATH needs, or in a folder that was slimmed into DIR. So name each copy of such a folder as
    PATH: prune does not know of copies, and a library without its spare can't be loaded. If such
    a folder is not here now, prune removes no spare without --force. What a killed slim left goes
    in any case. It leaves all other files.

    Exit status: 0; 1 if nothing was removed because a library may need them; 2 wrong usage.
    """
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes, format_items
    from pytest_negativa.slimming.prune import prune_spares

    found = prune_spares(folder, paths, dry_run=dry_run, force=force)
    for path in found.unneeded:
        click.echo(printable(path.name))
    for path, library in found.needed.items():
        click.echo(printable(f"{path.name} stays: {library} needs it"))
    spares = format_items(len(found.unneeded), "spare", "spares")
    is_held = bool(found.unknown) and not force
    verb = "would be removed" if dry_run and not is_held else "stay" if is_held else "removed"
    click.echo(
        f"{spares} ({format_bytes(found.unneeded_size)} on disk) {verb}; "
        f"{format_items(len(found.needed), 'other', 'others')} needed"
    )
    if found.left:
        click.echo(
            f"what a killed slim left ({format_bytes(found.left_size)} on disk) "
            f"{'would be removed' if dry_run else 'removed'}"
        )
    if is_held:
        for reason in found.unknown:
            print_error(f"{reason}; bring it back, or pass --force if nothing needs these spares")
        click.get_current_context().exit(1)


def _request(flags: _Flags) -> SlimRequest:
    from pytest_negativa.slimming.slim import SlimRequest, refuse_other_files
    from pytest_negativa.slimming.slimmer import SlimOptions

    refuse_other_files([path for path in flags.paths if path.suffix != WHEEL_SUFFIX])
    by_lock = flags.lock_file is not None or not flags.archs
    for given, allowed, problem in (
        (flags.force_arch, flags.archs, "--force-arch goes with --arch"),
        (flags.keep_ptx, flags.archs, "--keep-ptx goes with --arch; a lock says which PTX stays"),
        (flags.require, by_lock, "--require goes with a lock"),
        (
            flags.drop_never_loaded,
            by_lock,
            "--drop-never-loaded goes with a lock, which tells what was loaded",
        ),
        (
            flags.spare_never_loaded,
            by_lock,
            "--spare-never-loaded goes with a lock, which tells what was loaded",
        ),
        (
            flags.spare_never_loaded,
            flags.spare is not None,
            "--spare-never-loaded goes with --spare: no proof says that a deployment does not load "
            "these libraries, so their code must be able to come back",
        ),
        (
            flags.spare_never_loaded,
            not flags.drop_never_loaded,
            "--spare-never-loaded does what --drop-never-loaded does, and more; give one of them",
        ),
        (flags.no_strip, not flags.strip_others, "--no-strip and --strip-others contradict"),
        (
            flags.spare,
            not flags.no_strip,
            "--spare: symbol tables and debug information go into the spare with the code; leave "
            "out --no-strip",
        ),
        (
            flags.logs,
            flags.cpu_pages is not None or flags.spare_never_loaded,
            "--add-misses goes with --cpu-pages or --spare-never-loaded; for GPU code of a lock, "
            "see negativa lock --add-misses",
        ),
        (
            flags.cpu_pages,
            flags.spare is not None,
            "--cpu-pages goes with --spare, so that untouched CPU code can come back; you need not "
            "ship the spares",
        ),
        (
            flags.target,
            flags.keep_originals is None,
            "--keep-originals: with --target the originals stay where they are",
        ),
    ):
        if given and not allowed:
            raise click.UsageError(problem)
    aside = flags.keep_originals
    return SlimRequest(
        paths=flags.paths,
        lock=_load_lock(flags.lock_file) if by_lock else None,
        devices=_devices(flags.archs, force=flags.force_arch),
        force_archs=flags.force_arch,
        keep_ptx=flags.keep_ptx,
        strip_others=flags.strip_others,
        drop_never_loaded=flags.drop_never_loaded,
        spare_never_loaded=flags.spare_never_loaded,
        require=flags.require,
        target=flags.target,
        options=SlimOptions(
            strip=not flags.no_strip,
            load_check=not flags.no_load_check,
            dry_run=flags.dry_run,
            keep_originals=None if aside is None else _absolute(aside),
            spare=None
            if flags.spare is None
            else _spare(
                flags.spare,
                flags.cpu_pages,
                flags.logs,
                by_arch=not by_lock,
            ),
            jobs=flags.jobs or len(os.sched_getaffinity(0)),
        ),
    )


def _absolute(folder: Path) -> Path:
    """The path from the root, by way of no folder that may move.

    Links stay in it: programs find spares by the name that was given.
    """
    return Path(os.path.realpath(folder)) if ".." in folder.parts else folder.absolute()


def _spare(
    folder: Path, cpu_pages: Path | None, logs: tuple[Path, ...], *, by_arch: bool
) -> SparePolicy:
    from pytest_negativa.hostcode.gather import load_usage
    from pytest_negativa.hostcode.page_logs import read_misses
    from pytest_negativa.reporting.text import print_warning
    from pytest_negativa.slimming.spares import SparePolicy

    usage = None if cpu_pages is None else load_usage(cpu_pages)
    for failure in () if usage is None else usage.failed:
        print_warning(f"{failure}; CPU code that only such tests need comes from the spare")
    policy = SparePolicy.of(_absolute(folder), usage, by_arch=by_arch)
    return policy.with_misses(read_misses(logs))


def _slim(request: SlimRequest, *, as_json: bool) -> None:
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.models.slimming import SlimStatus
    from pytest_negativa.slimming.licence_notice import show_notice
    from pytest_negativa.slimming.slim import slim_trees

    if request.lock is not None:
        _show_proof(request.lock)
    unchanged = request.options.dry_run or request.target is not None
    with (
        interruptible(_NOTHING if unchanged else _GOES_ON),
        ByteProgress("slimming") as progress,
    ):
        is_wheel = any(path.suffix == WHEEL_SUFFIX for path in request.paths)
        if is_wheel:
            from pytest_negativa.slimming.wheel import slim_wheel

            report = slim_wheel(request, progress.update)
            _show_wheel(request, report)
        else:
            report = slim_trees(request, progress.update, _say_how_to_reinstall)
    if any(row.status is SlimStatus.SLIMMED for row in report.rows):
        show_notice(lambda text: click.echo(text, err=True))
    _show_ways_back(request, report)
    # A wheel without GPU code becomes a copy, so that all of an environment may go through slim.
    reason = None if is_wheel or report.stopped else _why_nothing(request, report)
    nothing_to_do = "" if reason else f"nothing to slim in {_places(*request.paths)}"
    stopped = report.stopped
    _finish(report.rows, nothing_to_do, as_json=as_json, stopped=stopped, nothing_done=reason)


def _why_nothing(request: SlimRequest, report: SlimReport) -> str | None:
    """The reason that no library was slimmed, for an error; None if there was work."""
    places = _places(*request.paths)
    if request.lock is not None and _is_foreign(request.lock, report):
        return f"nothing of the lock is in {places}: is it the lock of another environment?"
    if report.rows:
        return None
    what = "nothing of the lock is there" if request.lock is not None else "no library has GPU code"
    if any(any(path.glob(f"*{WHEEL_SUFFIX}")) for path in request.paths):
        what += "; the wheels there were not opened: pass each by its own path, with --target"
    return f"nothing to slim in {places}: {what}"


def _show_ways_back(request: SlimRequest, report: SlimReport) -> None:
    from pytest_negativa.models.slimming import SlimStatus
    from pytest_negativa.reporting.text import print_warning, printable
    from pytest_negativa.reporting.units import format_bytes
    from pytest_negativa.slimming.prune import find_unneeded
    from pytest_negativa.slimming.slim import default_paths

    if not any(row.status is SlimStatus.SLIMMED for row in report.rows):
        return
    places = (request.paths or default_paths()) if request.target is None else (request.target,)
    undo = f"negativa slim undo {printable(shlex.join(dict.fromkeys(map(str, places))))}"
    if (aside := request.options.keep_originals) is not None:
        click.echo(
            f"negativa: {printable(str(aside))} has the originals; {undo} puts them back", err=True
        )
    # A run that cut nothing leaves no folder that it made.
    if (spare := request.options.spare) is None or not spare.folder.is_dir():
        return
    has = f"negativa: {printable(str(spare.folder))} has what was removed"
    try:
        found = find_unneeded(spare.folder, by_manifests=True)
    except NegativaError as e:  # Such as the manifest of another folder that was slimmed into it.
        click.echo(f"{has}; {undo} puts it back", err=True)
        print_warning(str(e))
        return
    # Of other libraries, too.
    size = f"all spares there: {format_bytes(found.size)} on disk"
    click.echo(f"{has} ({size}); {undo} puts it back", err=True)
    _show_unneeded(spare.folder, found)


def _show_unneeded(
    folder: Path, found: Spares, before: str = "note: ", after: str = " of earlier slims"
) -> None:
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes, format_items

    if found.unneeded:
        click.echo(
            f"negativa: {before}{format_items(len(found.unneeded), 'spare', 'spares')} "
            f"({format_bytes(found.unneeded_size)} on disk){after}: negativa slim prune "
            f"{printable(shlex.quote(str(folder)))} removes those that no library needs",
            err=True,
        )


def _show_left_spares(folders: Collection[Path]) -> None:
    """Tell that undo left spares, if no library needs them."""
    from pytest_negativa.reporting.text import print_warning, printable
    from pytest_negativa.slimming.prune import find_unneeded

    for folder in sorted(folders):
        if not folder.is_dir():
            continue
        try:
            found = find_unneeded(folder, by_manifests=True)
        except NegativaError as e:  # Such as the manifest of another folder with spares there.
            print_warning(str(e))
            continue
        _show_unneeded(folder, found, f"{printable(str(folder))} still has ", "")


def _show_wheel(request: SlimRequest, report: SlimReport) -> None:
    from pytest_negativa.models.slimming import SlimStatus
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes

    assert request.target is not None
    [wheel] = request.paths
    new = request.target / wheel.name
    if not new.exists():
        return
    if all(row.status is not SlimStatus.SLIMMED for row in report.rows):
        click.echo(
            f"negativa: {printable(str(new))} is a copy: nothing was slimmed in the wheel", err=True
        )
    else:
        sizes = f"{format_bytes(wheel.stat().st_size)} -> {format_bytes(new.stat().st_size)}"
        click.echo(
            f"negativa: {printable(str(new))}: {sizes}; check the licences of its libraries before "
            "you pass it on",
            err=True,
        )


def _is_foreign(lock: Lock, report: SlimReport) -> bool:
    from pytest_negativa.models.slimming import UNMET, SlimStatus

    # A distribution has a row for each site with another version of it.
    unmet = all(row.status in UNMET - {SlimStatus.SPARE_AWAY} for row in report.rows)
    return unmet and len(report.rows) >= len(lock.libraries) + len(lock.files) > 0


def _say_how_to_reinstall(files: Sequence[tuple[Path, Origin | None]]) -> None:
    """Say before the first change that originals are not kept, and what brings them back."""
    from pytest_negativa.installed.origin import reinstall_commands
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_items

    if not files:
        return
    commands = reinstall_commands((path, one) for path, one in files if one is not None)
    unknown = sum(origin is None for _path, origin in files)
    lines = [
        "negativa: note: slim does not keep the originals of "
        f"{format_items(len(files), 'file', 'files')} that it may change or remove; "
        "--keep-originals DIR keeps them"
    ]
    if commands:
        lines.append("To get them back later:")
        lines += [f"  {printable(command)}" for command in commands]
    if unknown:
        lines.append(
            f"No distribution claims {format_items(unknown, 'file', 'files')} of these: "
            "copy them first, or keep them"
        )
    click.echo("\n".join(lines), err=True)


def _load_lock(path: Path | Url | None) -> Lock:
    from pytest_negativa.storage.lockfile import load_lock

    if path is None and not Path(_LOCK).is_file():
        raise click.UsageError(
            f"no {_LOCK} here: give --lock, or --arch to keep what GPUs of some archs can load"
        )
    return load_lock(path or Path(_LOCK))


def _devices(archs: Sequence[str], *, force: bool) -> tuple[ComputeCapability, ...]:
    try:
        return parse_devices(archs, also_unknown=force)
    except OptionError as e:
        # Of a mistyped arch, all code for the GPUs that are there could go.
        hint = " (--force-arch takes it as it is)" if isinstance(e, UnknownArch) else ""
        raise click.BadParameter(f"{e}{hint}", param_hint="--arch") from None


def _show_proof(lock: Lock) -> None:
    """Tell what a lock doesn't rest on."""
    from pytest_negativa.reporting.text import printable

    doubts = [(row.path, row.not_proved) for row in lock.libraries if row.not_proved is not None]
    doubts += [(f.distribution, f.not_proved) for f in lock.files if f.not_proved is not None]
    if not lock.proof.proved:
        reasons = printable("; ".join(lock.proof.not_proved))
        click.echo(f"negativa: warning: this lock is NOT PROVED: {reasons}", err=True)
    elif _COMPACTED not in lock.proof.copies:
        click.echo(
            "negativa: note: this lock was proved on overwritten copies alone, and slim writes "
            "compacted files; to prove both, use pytest --negativa-verify --negativa-copies=both "
            "(or negativa verify --copies both) and lock again",
            err=True,
        )
    if lock.proof.proved and doubts:
        first = printable(": ".join(doubts[0]))
        more = f" (and {len(doubts) - 1:,} more)" if len(doubts) > 1 else ""
        click.echo(f"negativa: warning: NOT PROVED in this lock: {first}{more}", err=True)


def _places(*paths: Path) -> str:
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.slimming.slim import default_paths

    return ", ".join(dict.fromkeys(printable(str(path)) for path in paths or default_paths()))


def _finish(
    rows: Sequence[SlimRow],
    nothing: str,
    *,
    as_json: bool,
    stopped: bool = False,
    checked: bool = False,
    require: bool = False,
    nothing_done: str | None = None,
) -> None:
    """Print, and leave with the status that follows.

    Args:
        rows: of all libraries.
        nothing: the text if there are no rows.
        as_json: print JSON.
        stopped: nothing was done.
        checked: the rows are of libraries that were checked, and not changed.
        require: a library that is not what was wanted is an error, too.
        nothing_done: why there was nothing to work on, which is an error.
    """
    from pytest_negativa.models.listing import LISTING_VERSION, SlimList
    from pytest_negativa.models.slimming import PROBLEMS, UNMET
    from pytest_negativa.reporting.slimming import render_check, render_problems, render_rows

    render = render_check if checked else render_rows
    if as_json:
        listing = SlimList(format_version=LISTING_VERSION, libraries=tuple(rows), stopped=stopped)
        click.echo(encode_json(listing), nl=False)
    elif text := render(rows, nothing):
        show(text)
    for line in render_problems(rows):
        print_error(line)
    if stopped:
        print_error("nothing was done: libraries of the lock are missing")
    if nothing_done is not None:
        print_error(nothing_done)
    problems = PROBLEMS | UNMET if require else PROBLEMS
    if stopped or nothing_done is not None or any(row.status in problems for row in rows):
        click.get_current_context().exit(1)


@click.command()
@click.argument("error", required=False, default="")
@click.option(
    "--in",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Search these packages of the program. (default: this interpreter's)",
)
@as_json_option("explanation")
def explain(error: str, folders: tuple[Path, ...], as_json: bool) -> None:
    """Tell whether slimmed libraries can cause a CUDA ERROR.

    explain also says what to do. ERROR is the message, such as "CUDA error: no kernel image is
    available for execution on the device". In a Python program:
    print(pytest_negativa.why(exception))
    """
    from pytest_negativa.models.listing import LISTING_VERSION, Explanation
    from pytest_negativa.slimming.explain import explain_error, rows_of, slimmed_in
    from pytest_negativa.slimming.slim import default_paths

    asked = folders or default_paths()
    slimmed = slimmed_in(asked)
    text = explain_error(error, slimmed, asked)
    if not as_json:
        click.echo(text)
        return
    explanation = Explanation(
        format_version=LISTING_VERSION, error=error, text=text, libraries=rows_of(slimmed)
    )
    click.echo(encode_json(explanation), nl=False)
