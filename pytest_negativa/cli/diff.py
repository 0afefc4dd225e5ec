"""The command that compares releases and runs: diff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from pytest_negativa.analysis.history import history_of_lock, history_of_runs
from pytest_negativa.analysis.snapshots import load_snapshot
from pytest_negativa.cli.common import (
    EXIT_FAILED,
    MATCH,
    answer,
    as_json_option,
    settings_of,
)
from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.base import Listing
from pytest_negativa.models.listing import LISTING_VERSION
from pytest_negativa.models.snapshot import Snapshot
from pytest_negativa.planning.coverage import split_signature
from pytest_negativa.planning.snapshot import compare_snapshots
from pytest_negativa.reporting.difference import render_difference
from pytest_negativa.reporting.history import is_named, render_history
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import GlobSet
from pytest_negativa.storage.runs import RunsFolder


@click.command()
@click.argument("before", metavar="[A", required=False)
@click.argument("after", metavar="B]", required=False)
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@MATCH
@click.option(
    "--top", type=click.IntRange(min=0), default=10, metavar="N",
    help="Show this many rows of each table; 0 shows all. (default: 10)",
)  # fmt: skip
@click.option("--library", "glob", metavar="GLOB", help="Show the growth of these libraries.")
@as_json_option("difference")
@click_options("reports.demangle")
def diff(
    before: str | None,
    after: str | None,
    headers_only: bool,
    globs: tuple[str, ...],
    top: int,
    glob: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what changed in the GPU code from A to B.

    Without B, it shows the growth from revision to revision of A, a lock file in a git repository.
    Without A, too, from run to run of the saved ones. Each row has the used and unused bytes at
    that time; with --library, those of each library with the version of its distribution. The
    JSON has the schema history then.

    A and B are runs (an id or a folder), lock files, baselines, libraries, folders of libraries,
    wheels and other archives, or installed distributions. Libraries are paired by their path in
    site-packages or in the current folder, else by file name. The tables show what grew, by
    library, arch and reason; the lists show kernels that appeared, went, or are newly used or
    unused.
    A lock tells no archs and no kernels, and a library alone tells no reasons.
    Files that are GPU code themselves count as one for each distribution or folder.
    A slimmed library has the code that is left in the file; code in a spare counts as gone.

    Exit status: 0, or 1 if A or B, or a library in them, can't be read, or there is no history.
    """
    settings = settings_of(flags)
    if before is None or after is None:
        _show_growth(before, RunsFolder(Path(settings.directory)), glob, as_json=as_json)
        return
    if glob is not None:
        raise click.UsageError("--library shows growth: leave out B")
    runs, cache = RunsFolder(Path(settings.directory)), open_cache(settings.cache)
    unread: list[NegativaError] = []

    def load(argument: str) -> Snapshot:
        with Progress(f"reading {argument}") as progress:
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
    answer(difference, render_difference(difference, shown_as, top), as_json=as_json)
    if globs and not difference.kernels and not as_json:
        click.echo(f"\n0 of {changed:,} changed kernels match")
    if unread:
        click.get_current_context().exit(EXIT_FAILED)


def _show_growth(lock: str | None, runs: RunsFolder, glob: str | None, *, as_json: bool) -> None:
    """Show the GPU code of the revisions of a lock, or of the saved runs."""
    points = history_of_runs(runs) if lock is None else history_of_lock(Path(lock))
    names = sorted({one.name for point in points for one in point.libraries})
    if glob is not None and not any(is_named(glob, name) for name in names):
        raise click.BadParameter(
            f"{glob!r} is no library of the history; it has {', '.join(names) or 'none'}",
            param_hint="--library",
        )
    listing = Listing(format_version=LISTING_VERSION, rows=_only(glob, points))
    answer(listing, render_history(points, glob), as_json=as_json)


def _only(glob: str | None, points: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    """The points with the libraries alone whose names match."""
    if glob is None:
        return points
    return tuple(
        msgspec.structs.replace(
            point, libraries=tuple(one for one in point.libraries if is_named(glob, one.name))
        )
        for point in points
    )
