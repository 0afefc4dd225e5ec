"""The commands that send runs and spares to object stores, and bring them here: push, fetch."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.cli.common import (
    active_paths,
    interruptible,
    run_of,
    runs_of,
    settings_of,
)
from pytest_negativa.cli.slim_output import GOES_ON, absolute, finish, places
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes
from pytest_negativa.slimming.remote_spares import fetch_spares, push_spares
from pytest_negativa.storage.urls import Url, is_url
from pytest_negativa.tracing.files import require_ended


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[RUN|PATH]... URL")
@click.option("--spares", is_flag=True, help="Send the spares of the libraries in PATH.")
def push(words: tuple[str, ...], spares: bool) -> None:
    """Send a run to a URL, or the spares of slimmed libraries.

    \b
    negativa push s3://bucket/build-7/shard-1
    negativa push --spares s3://bucket/spares

    RUN is an id that runs list prints, or a folder; without it, the last run. Files that are at the
    URL, or at that of another run in its folder, are not sent again. Another run that lies at the
    URL is replaced. URLs need the extra urls, and the driver of the store.

    With --spares, PATH is a folder or a library that was slimmed with --spare; by default, the
    active environment. negativa-slim.json in each slimmed folder keeps
    the URL, for negativa fetch. Several folders may use one URL.

    Exit status: 0; 1 if the run or a spare can't be read or sent; 128 + N if signal N interrupted
    it.
    """
    *named, url = words
    if spares:
        _push_spares(tuple(map(Path, named)), Url(url))
        return
    if len(named) > 1:
        raise click.UsageError("expected at most one RUN, and the URL")
    _push_run(named, Url(url))


def _push_spares(paths: tuple[Path, ...], url: Url) -> None:
    paths = paths or active_paths()
    with interruptible(GOES_ON):
        rows = push_spares(paths, url)
    finish(rows, f"no library with a spare in {places(*paths)}")


def _push_run(named: list[str], url: Url) -> None:
    settings = settings_of()
    run = runs_of(settings).find(named[0]) if named else run_of(settings)
    require_ended(run.trace_files())
    sent, known = run.publish(url)
    sizes = f"{format_bytes(sent)} sent, {format_bytes(known)} there"
    click.echo(printable(f"{url}: {run.run_id}, {sizes}"))


@click.command()
@click.argument("words", nargs=-1, metavar="[URL|PATH]...")
@click.option(
    "--spare",
    "folder",
    metavar="DIR",
    envvar="NEGATIVA_SPARE_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put spares into DIR. (default: NEGATIVA_SPARE_DIR)",
)
def fetch(words: tuple[str, ...], folder: Path | None) -> None:
    """Fetch runs from URLs, or the spares that slimmed libraries lack.

    \b
    negativa fetch s3://bucket/build-7/shard-1
    negativa fetch --spare /spares

    URL is where negativa push sent a run. Every command with --run takes a URL, too, and fetches
    the run first. A run that is here already is not fetched again.

    Without a URL, fetch takes spares, from where negativa push --spares sent them. Run it before
    the program starts: a library looks for its spare when it is loaded. A spare is taken only if it
    gives the original back, by its digest. PATH is a folder or a
    library that was slimmed with --spare; by default, the active environment.

    Exit status: 0; 1 if a run or a spare can't be fetched, or another run of the same id is here;
    128 + N if signal N interrupted it.
    """
    urls = [word for word in words if is_url(word)]
    if not urls:
        if folder is None:
            raise click.UsageError("give the URL of a run; or for spares --spare DIR")
        _fetch_spares(tuple(map(Path, words)), folder)
        return
    if len(urls) < len(words):
        raise click.UsageError("PATH goes with spares, which have no URL here")
    runs = runs_of(settings_of())
    for url in urls:
        click.echo(printable(str(runs.fetch(Url(url)))))


def _fetch_spares(paths: tuple[Path, ...], folder: Path) -> None:
    paths = paths or active_paths()
    with interruptible(GOES_ON):
        rows = fetch_spares(paths, absolute(folder))
    finish(rows, f"no spare to fetch in {places(*paths)}")
