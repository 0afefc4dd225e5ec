"""The commands that send runs to object stores, and bring them here: push, fetch."""

from __future__ import annotations

import click

from pytest_negativa.cli.common import run_of, runs_of, settings_of
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes
from pytest_negativa.storage.urls import Url
from pytest_negativa.tracing.files import require_ended


@click.command()
@click.argument("name", required=False, metavar="[RUN]")
@click.argument("url")
def push(name: str | None, url: str) -> None:
    """Send a run to a URL.

    \b
    negativa push s3://bucket/build-7/shard-1

    RUN is an id that runs list prints, or a folder; without it, the last run. Files that are at the
    URL, or at that of another run in its folder, are not sent again. Another run that lies at the
    URL is replaced. URLs need the extra urls, and the driver of the store.

    Exit status: 0; 1 if the run can't be read or sent; 128 + N if signal N interrupted it.
    """
    settings = settings_of()
    run = runs_of(settings).find(name) if name else run_of(settings)
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
