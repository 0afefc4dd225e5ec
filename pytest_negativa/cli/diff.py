"""The commands that compare releases and runs: baseline, diff, history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pytest_negativa.cli.common import (
    EXIT_FAILED,
    MATCH,
    PathOrUrl,
    as_json_option,
    encode_json,
    run_of,
    settings_of,
    show,
)
from pytest_negativa.reporting.text import print_error, printable
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.urls import Url

if TYPE_CHECKING:
    from pytest_negativa.errors import NegativaError
    from pytest_negativa.models.snapshot import HistoryPoint, Snapshot

_BASELINE = "negativa-baseline.json"


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@MATCH
@click.option(
    "--top", type=click.IntRange(min=0), default=10, metavar="N",
    help="Show this many rows of each table; 0 shows all. (default: 10)",
)  # fmt: skip
@as_json_option("difference")
@click_options("reports.demangle")
def diff(
    before: str,
    after: str,
    headers_only: bool,
    globs: tuple[str, ...],
    top: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what changed in the GPU code from A to B.

    A and B are runs (an id or a folder), lock files, baselines, libraries, folders of libraries,
    wheels and other archives, or installed distributions. Libraries are paired by their path in
    site-packages or in the current folder, else by file name. The tables show what grew, by
    library, arch and reason; the lists show kernels that appeared, went, or are newly used or
    unused.
    A lock tells no archs and no kernels, and a library alone tells no reasons.
    Files that are GPU code themselves count as one for each distribution or folder.
    A slimmed library has the code that is left in the file; code in a spare counts as gone.

    Exit status: 0, or 1 if A or B, or a library in them, can't be read.
    """
    from pytest_negativa.analysis.snapshots import load_snapshot
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.gpucode.cache import open_cache
    from pytest_negativa.gpucode.demangle import demangle
    from pytest_negativa.models.listing import LISTING_VERSION, DifferenceList
    from pytest_negativa.planning.coverage import split_signature
    from pytest_negativa.planning.snapshot import compare_snapshots
    from pytest_negativa.reporting.difference import render_difference
    from pytest_negativa.settings.globs import GlobSet
    from pytest_negativa.storage.runs import RunsFolder

    settings = settings_of(flags)
    runs, cache = RunsFolder(Path(settings.directory)), open_cache(settings.cache)
    unread: list[NegativaError] = []

    def load(argument: str) -> Snapshot:
        with ByteProgress(f"reading {argument}") as progress:
            return load_snapshot(
                argument,
                runs,
                on_unread=unread.append,
                headers_only=headers_only,
                cache=cache,
                on_done=progress.update,
            )

    def template_of(name: str) -> str:
        return "::".join(filter(None, split_signature(demangle(name))))

    shown_as = template_of if settings.reports.demangle else str
    try:
        difference = compare_snapshots(load(before), load(after))
    finally:
        # The figures lack these, so they are named first.
        for error in unread:
            print_error(error)
    changed = sum(len(one.names()) for one in difference.kernels)
    if globs:
        wanted = GlobSet(globs)
        changes = (
            one.only(lambda name: bool(wanted.match(name, demangle(name))))
            for one in difference.kernels
        )
        chosen = tuple(one for one in changes if one.names())
        difference = msgspec.structs.replace(difference, kernels=chosen)
    if as_json:
        listing = DifferenceList(format_version=LISTING_VERSION, difference=difference)
        click.echo(encode_json(listing), nl=False)
    else:
        show("\n\n".join(render_difference(difference, shown_as, top)))
        if globs and not difference.kernels:
            click.echo(f"\n0 of {changed:,} changed kernels match")
    if unread:
        click.get_current_context().exit(EXIT_FAILED)


@click.command()
@click.option(
    "--output",
    "-o",
    type=PathOrUrl(dir_okay=False, path_type=Path),
    default=_BASELINE,
    help=f"Write the baseline to this file or URL; - for standard output. (default: {_BASELINE})",
)
@click_options("run")
def baseline(output: Path | Url, **flags: Any) -> None:
    """Write the figures of a run to a small file, to compare later runs with.

    Commit the file. pytest --negativa --negativa-compare=FILE shows what grew since, and
    --negativa-compare-fail sets limits. The file has sizes by library, arch and reason, and the
    names of kernels of the project's own libraries.

    Exit status: 0, or 1 if the run has no plan.
    """
    from pytest_negativa.analysis.baseline import make_baseline
    from pytest_negativa.reporting.units import format_items
    from pytest_negativa.storage.output import STDOUT, write_output
    from pytest_negativa.storage.results import load_planned, load_report

    run = run_of(settings_of(flags))
    report = load_report(run)
    covered = {one.path: one for one in report.coverage}
    planned = [
        replace(one, coverage=covered.get(one.plan.library.path)) for one in load_planned(run)
    ]
    found = make_baseline(run.run_id, planned, report.code_files)
    write_output(output, encode_json(found))
    if str(output) != STDOUT:
        libraries = format_items(len(found.libraries), "library", "libraries")
        click.echo(printable(f"{output}: {libraries} of {run}"))


@click.command()
@click.argument("lock", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--library", "glob", metavar="GLOB", help="Show libraries whose names match.")
@as_json_option("history")
def history(lock: Path | None, glob: str | None, as_json: bool) -> None:
    """Show how GPU code grew over the saved runs, or over the revisions of LOCK.

    LOCK is a lock file in a git repository. Each row has the used and unused bytes at that time;
    with --library, those of each library with the version of its distribution.

    Exit status: 0, or 1 if there is no history.
    """
    from pytest_negativa.analysis.history import history_of_lock, history_of_runs
    from pytest_negativa.models.listing import LISTING_VERSION, HistoryList
    from pytest_negativa.reporting.history import is_named, render_history
    from pytest_negativa.storage.runs import RunsFolder

    settings = settings_of()
    if lock is None:
        points = history_of_runs(RunsFolder(Path(settings.directory)))
    else:
        points = history_of_lock(lock)
    names = sorted({one.name for point in points for one in point.libraries})
    if glob is not None and not any(is_named(glob, name) for name in names):
        raise click.BadParameter(
            f"{glob!r} is no library of the history; it has {', '.join(names) or 'none'}",
            param_hint="--library",
        )
    if as_json:
        listing = HistoryList(format_version=LISTING_VERSION, points=_only(glob, points))
        click.echo(encode_json(listing), nl=False)
        return
    show("\n\n".join(render_history(points, glob)))


def _only(glob: str | None, points: tuple[HistoryPoint, ...]) -> tuple[HistoryPoint, ...]:
    """The points with the libraries alone whose names match."""
    from pytest_negativa.reporting.history import is_named

    if glob is None:
        return points
    return tuple(
        msgspec.structs.replace(
            point, libraries=tuple(one for one in point.libraries if is_named(glob, one.name))
        )
        for point in points
    )
