"""The commands that look after traced runs: runs list, delete."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.cli.common import answer, as_json_option, runs_of, settings_of
from pytest_negativa.errors import StoreError
from pytest_negativa.models.base import Listing
from pytest_negativa.models.listing import LISTING_VERSION, RunRow
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes
from pytest_negativa.storage.results import load_verdict
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.tracing.files import TraceReader


@click.group()
def runs() -> None:
    """List and delete traced runs.

    Exit status: 0, or 1 if a run can't be read or deleted.
    """


@runs.command("list")
@as_json_option("runs")
def list_runs(as_json: bool) -> None:
    """List the traced runs, the newest first.

    Exit status: 0.
    """
    folder = runs_of(settings_of())
    listing = Listing(format_version=LISTING_VERSION, rows=tuple(map(_row, folder.runs())))
    rows = [
        (row.run_id, "latest" if row.is_latest else "", row.state, format_bytes(row.size))
        for row in listing.rows
    ]
    paragraphs = [printable(f"no traced run in {folder.folder}")]
    if rows:
        headers = ("run", "", "state", "size")
        paragraphs = [format_table("lllr", headers, rows, drop=(3, 1), names=())]
    if folder.copies.is_dir():
        paragraphs.append(f"copies of libraries: {format_bytes(_size(folder.copies))}")
    then = "negativa report" if rows else "pytest --negativa"
    answer(listing, paragraphs, as_json=as_json, then=then)


@runs.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Delete all but N runs.")
@click.option("--copies", is_flag=True, help="Delete the copies of libraries, too.")
def delete(runs: tuple[str, ...], keep: int | None, copies: bool) -> None:
    """Delete runs, and the copies that verifications wrote.

    RUN is an id that list prints, or a folder. --keep N keeps the newest N. A run or copies in use
    stay. Verify a run again, and the copies are written anew.

    Exit status: 0, or 1 if a run could not be deleted.
    """
    settings = settings_of()
    folder = runs_of(settings)
    doomed = [runs_of(settings).find(run) for run in runs]
    if keep is not None:
        doomed += [run for run in folder.runs()[keep:] if run not in doomed]
    if not doomed and not copies:
        if keep is None:
            raise click.UsageError("name a RUN, or give --keep or --copies")
        click.echo("no run to delete")
    for run in doomed:
        run.delete()
        click.echo(printable(f"deleted {run}"))
    if copies:
        _delete_copies(folder.copies)


def _row(run: Run) -> RunRow:
    latest = RunsFolder(run.folder.parent).latest
    return RunRow(
        run_id=run.run_id,
        folder=str(run),
        is_latest=latest.resolve() == run.folder.resolve(),
        state=_state(run),
        size=_size(run.folder),
    )


def _state(run: Run) -> str:
    """How far a run came, and whether it is a replay; for one that can't be read, why."""
    try:
        return f"{_readable_state(run)} (replay)" if _is_replay(run) else _readable_state(run)
    except (StoreError, OSError) as e:
        return f"can't be read: {e}"


def _is_replay(run: Run) -> bool:
    """Whether a run replays a recording, or one of those that it unites does."""
    headers = (TraceReader(path).header for path in run.trace_files())
    return any(header is not None and header.replay is not None for header in headers)


def _readable_state(run: Run) -> str:
    if (failure := run.failure) is not None:
        return f"failed: {failure}"
    if (reason := run.incomplete_reason) is not None:
        return f"incomplete: {reason}"
    if (reason := run.partial_reason) is not None:
        return f"partial: {reason}"
    if run.has_samples:
        return "samples"
    try:
        verdict = load_verdict(run)
    except StoreError:
        return "its verdict can't be read"
    if verdict is not None:
        return "proved" if verdict.proved else "not proved"
    if run.plan_files():
        return "planned"
    return "empty" if run.is_empty else "traced"


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _delete_copies(root: Path) -> None:
    """Delete what the manifest of copies names; the rest of the folder stays."""
    # Nothing else of this module needs what writes libraries.
    from pytest_negativa.rewriting.reconstruct import reconstruct

    if root.is_dir():
        reconstruct((), root)
        click.echo(printable(f"deleted the copies in {root}"))
    else:
        click.echo(printable(f"no copies in {root}"))
