"""``negativa runs`` (states, --delete, --keep), ``push`` and ``fetch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pytest_negativa.cli.common import (
    answer,
    as_json_option,
    check_usage,
    runs_of,
    settings_and_run,
    settings_of,
)
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.models.base import Listing
from pytest_negativa.models.listing import RunRow
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.results import load_verdict
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.urls import Url, is_url
from pytest_negativa.tracing.trace_files import TraceReader, require_ended


@click.command()
@click.option("--delete", "doomed", multiple=True, metavar="RUN", help="Delete this run.")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Delete all but N runs.")
@as_json_option("runs")
def runs(doomed: tuple[str, ...], keep: int | None, as_json: bool) -> None:
    """List the traced runs, the newest first, or delete some.

    RUN is an id that the list has, or a folder. --keep N keeps the newest N. A run in use stays.

    Exit status: 0, or 1 if a run could not be deleted.
    """
    folder = runs_of(settings_of())
    if not doomed and keep is None:
        _list(folder, as_json=as_json)
        return
    check_usage((as_json, "--json lists the runs: leave out --delete and --keep"))
    _delete(folder, doomed, keep)


def _list(folder: RunsFolder, *, as_json: bool) -> None:
    latest = folder.latest.resolve()
    runs = tuple(
        RunRow(
            run_id=run.run_id,
            folder=str(run),
            is_latest=latest == run.folder.resolve(),
            state=_state(run),
            size=_size(run.folder),
        )
        for run in folder.runs()
    )
    listing = Listing(rows=runs)
    rows = [
        (row.run_id, "latest" if row.is_latest else "", row.state, format_bytes(row.size))
        for row in listing.rows
    ]
    paragraphs = [printable(f"no traced run in {folder.folder}")]
    if rows:
        paragraphs = [
            format_table("lllr", ("run", "", "state", "size"), rows, drop=(3, 1), names=())
        ]
    if folder.copies.is_dir():
        paragraphs.append(
            printable(f"{folder.copies}: copies of libraries, {format_bytes(_size(folder.copies))}")
        )
    answer(
        listing,
        paragraphs,
        as_json=as_json,
        then="negativa report" if rows else "pytest --negativa",
    )


def _delete(folder: RunsFolder, names: tuple[str, ...], keep: int | None) -> None:
    doomed: list[Run] = []
    for name in names:
        if is_url(name):
            raise OptionError(f"{name}: a URL; --delete deletes runs in {folder.folder}")
        places = (Path(name), folder.folder / name)
        if any(place.is_symlink() and place.name != folder.latest.name for place in places):
            raise OptionError(f"{name}: a link; name the run itself, to delete it")
        if (run := folder.find(name)) not in doomed:
            doomed.append(run)
    if keep is not None:
        doomed += [run for run in folder.runs() if run not in doomed][keep:]
    if not doomed:
        click.echo("no run to delete")
    for run in doomed:
        run.delete()
        click.echo(printable(f"deleted {run}"))


def _state(run: Run) -> str:
    """State of a run, and whether it is a replay; the error of one that can't be read."""
    try:
        headers = (TraceReader(path).header for path in run.trace_files())
        # The run itself, or one of those that it unites.
        is_replay = any(header is not None and header.replay is not None for header in headers)
        return _readable_state(run) + (" (replay)" if is_replay else "")
    except (StoreError, OSError) as e:
        return f"can't be read: {e}"


def _readable_state(run: Run) -> str:
    for word, reason in (
        ("failed", run.failure),
        ("incomplete", run.incomplete_reason),
    ):
        if reason is not None:
            return f"{word}: {reason}"
    if run.has_samples:
        return "samples"
    if (verdict := load_verdict(run)) is not None:
        return "proved" if verdict.proved else "not proved"
    if run.plan_files():
        return "planned"
    return "empty" if run.is_empty else "traced"


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


@click.command()
@click.argument("url")
@click_options("run")
def push(url: str, **flags: Any) -> None:
    """Send a run to a URL.

    \b
    negativa push s3://bucket/build-7/shard-1

    Files that are at the URL, or at that of another run in its folder, are not sent again. Another
    run that lies at the URL is replaced. URLs need the extra urls, and the driver of the store.

    Exit status: 0; 1 if the run can't be read or sent; 128 + N if signal N interrupted it.
    """
    _settings, run = settings_and_run(flags)
    require_ended(run.trace_files())
    sent, known = run.publish(Url(url))
    sizes = f"{format_bytes(sent)} sent, {format_bytes(known)} there"
    click.echo(printable(f"{url}: {run.run_id}, {sizes}"))


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
def fetch(urls: tuple[str, ...]) -> None:
    """Fetch runs from URLs.

    \b
    negativa fetch s3://bucket/build-7/shard-1

    URL is where negativa push sent a run. Every command with --run takes a URL, too, and fetches
    the run first. A run that is here already is not fetched again.

    Exit status: 0; 1 if a run can't be fetched, or another run of the same id is here;
    128 + N if signal N interrupted it.
    """
    runs = runs_of(settings_of())
    for url in urls:
        click.echo(printable(str(runs.fetch(Url(url)))))
