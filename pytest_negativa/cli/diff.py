"""The command that compares the GPU code of two runs, locks, libraries or folders: diff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pytest_negativa.cli.common import settings_of
from pytest_negativa.settings.flags import click_options

_TOP = 10


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--top", default=_TOP, show_default=True, help="Show N rows of each list; 0: all.")
@click.option("--headers-only", is_flag=True, help="Read headers alone: fast, but no kernels.")
@click_options("config", "directory")
def diff(before: str, after: str, top: int, headers_only: bool, **flags: Any) -> None:
    """Show what changed in the GPU code from A to B.

    A and B are runs (an id or a folder), lock files, baselines, libraries, folders of libraries or
    installed distributions. Libraries are paired by file name. The tables show what grew, by
    library, arch and reason; the lists show kernels that appeared, went, or are newly used or
    unused. A lock tells no archs and no kernels, and a library alone tells no reasons.

    Exit status: 0, or 1 if A or B can't be read.
    """
    from pytest_negativa.analysis.snapshots import load_snapshot
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.gpucode.cache import open_cache
    from pytest_negativa.gpucode.demangle import demangle
    from pytest_negativa.planning.coverage import split_signature
    from pytest_negativa.planning.snapshot import compare_snapshots
    from pytest_negativa.reporting.difference import render_difference
    from pytest_negativa.storage.runs import RunsFolder

    settings = settings_of(flags)
    runs, cache = RunsFolder(Path(settings.directory)), open_cache(settings.cache)
    sides = []
    for argument in (before, after):
        with ByteProgress(f"reading {argument}") as progress:
            side = load_snapshot(
                argument, runs, headers_only=headers_only, cache=cache, on_done=progress.update
            )
        sides.append(side)

    def template_of(name: str) -> str:
        return "::".join(filter(None, split_signature(demangle(name))))

    difference = compare_snapshots(*sides)
    click.echo("\n\n".join(render_difference(difference, template_of, top)))
