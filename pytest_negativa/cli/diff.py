"""``negativa diff``: what changed between releases, runs, locks or baselines."""

from __future__ import annotations

import shlex
from typing import Any

import click
import msgspec

from pytest_negativa.analysis.snapshots import load_snapshot
from pytest_negativa.cli.common import (
    MATCH,
    answer,
    as_json_option,
    check_usage,
    runs_of,
    settings_of,
)
from pytest_negativa.errors import ExitStatus, NegativaError
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.snapshot import Snapshot
from pytest_negativa.planning.snapshot import compare_snapshots
from pytest_negativa.reporting.difference import render_difference
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import GlobSet
from pytest_negativa.storage.results import load_history


@click.command()
@click.argument("before", metavar="[A", required=False)
@click.argument("after", metavar="B]", required=False)
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@MATCH
@as_json_option("difference")
@click_options("reports.top")
def diff(
    before: str | None,
    after: str | None,
    headers_only: bool,
    globs: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what changed in the GPU code from A to B.

    Without B, it is the last run. Without A, A is the run before it. Runs without a plan for
    all tests don't count. A and B are runs (an id or a folder), lock files, baselines, libraries,
    folders of libraries, wheels and other archives, or installed distributions. Libraries are
    paired by their path in site-packages or in the current folder, else by file name. The tables
    show what grew, by
    library, arch and reason; the lists show kernels that appeared, went, or are newly used or
    unused.
    A lock tells no archs and no kernels, and a library alone tells no reasons.
    Files that are GPU code themselves count as one for each distribution or folder.
    A slimmed library has the code that is left in the file; code in a spare counts as gone.

    Exit status: 0, or 1 if A or B, or a library in them, can't be read.
    """
    settings = settings_of(flags)
    runs, cache = runs_of(settings), open_cache(settings.cache_dir)
    if before is None or after is None:
        # A named run, or the last but one with a plan for all tests; and the last.
        planned = [report.run_id for report in load_history(runs.find())]
        sides = (*([before] if before else planned[-2:-1]), *planned[-1:])
        check_usage((len(sides) < 2, "name A and B: no two saved runs have a plan"))
        before, after = sides
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

    try:
        new = load(after)
        difference = compare_snapshots(load(before), new)
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
    paragraphs = [*render_difference(difference, settings.reports.top)]
    if globs and not difference.kernels:
        paragraphs.append(f"0 of {changed:,} changed kernels match")
    is_planned = any(row.reason for library in new.libraries for row in library.rows)
    look = "pytest --negativa --negativa-compare=" if is_planned else "negativa inspect "
    then = None if unread else look + shlex.quote(after)
    answer(difference, paragraphs, as_json=as_json, then=then)
    if unread:
        click.get_current_context().exit(ExitStatus.FAILED)
