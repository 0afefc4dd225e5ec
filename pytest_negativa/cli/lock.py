"""``negativa lock``: a run to a lock, and one that keeps more (misses, uses)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.lock import Widened, lock_run, widen_by_use, widen_lock
from pytest_negativa.cli.common import (
    EXISTING,
    LOCK,
    PATHS,
    PathOrUrl,
    active_paths,
    check_usage,
    run_of,
    runs_of,
    say_next,
    settings_of,
    show,
    show_proof,
    slim_by,
)
from pytest_negativa.hostcode.page_logs import read_misses
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.storage.results import (
    load_opened,
)
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import STDOUT
from pytest_negativa.tracing.merge import merge_when_ended


@click.command()
@PATHS
@click.option(
    "-o",
    "--output",
    type=PathOrUrl(path_type=Path),
    default=LOCK,
    help=f"Write the lock to this file or URL; - is standard output. (default: {LOCK})",
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
    type=EXISTING,
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
@click_options("run")
def lock(
    paths: tuple[Path, ...],
    output: Path | Url,
    unproved: bool,
    logs: tuple[Path, ...],
    used: tuple[str, ...],
    **flags: Any,
) -> None:
    """Lock what a run proved, for machines without a GPU.

    The run was traced and proved (pytest --negativa --negativa-verify). The lock names each library
    by its digest and lists the GPU code that stays. Commit it beside the project's requirements;
    negativa slim applies it when an image is built.

    With --add-misses, the lock keeps the GPU code that came back to libraries that were slimmed
    with a spare. LOG is a log, or a folder of logs: see negativa misses. PATH has the
    libraries; by default, the active environment. What the lock removes is still what was proved,
    or less. With --add-uses, it keeps what another run used, such as the
    samples of a service: see negativa trace --attach-env. The same holds for what it removes.

    Exit status: 0, or 1 if the run is not proved (see --unproved) or can't be read.
    """
    settings = settings_of(flags)
    check_usage(
        (logs and used, "--add-misses and --add-uses: give one of them"),
        (paths and not logs, "PATH goes with --add-misses"),
    )
    if logs:
        done = widen_lock(load_lock(output), read_misses(logs), paths or active_paths())
        _save_widened(output, done, "came back", "came back")
        return
    if used:
        runs = [runs_of(settings).find(name) for name in used]
        traces = [trace for run in runs for trace in run.require_traces()]
        opened = [files for run in runs for files in load_opened(run)]
        usage = merge_when_ended(lambda: traces)
        done = widen_by_use(load_lock(output), usage, settings, opened)
        _save_widened(output, done, "was used", "were used")
        return
    made, files_left_out = lock_run(run_of(settings), settings, unproved=unproved)
    save_lock(made, output)
    to_stdout = str(output) == STDOUT
    unused = sum(library.unused_bytes for library in made.libraries)
    trimmed = sum(library.trimmed_bytes for library in made.libraries)
    show(
        f"{printable(str(output))}: {format_items(len(made.libraries), 'library', 'libraries')}, "
        f"{format_bytes(unused)} of GPU code unused"
        + (f", and {format_bytes(trimmed)}, unpacked, within cubins that stay" if trimmed else ""),
        err=to_stdout,
    )
    for files in made.files:
        count = format_items(files.elements - files.kept_elements, "file", "files")
        show(
            f"{printable(files.path)}: {count} of GPU code ({format_bytes(files.unused_bytes)}) "
            "unused",
            err=to_stdout,
        )
    for row in (*made.left_out, *files_left_out):
        show(f"left out: {printable(row.path)}: {printable(row.reason)}", err=to_stdout)
    show_proof(made)
    say_next(slim_by(output))


def _save_widened(path: Path | Url, done: Widened, one: str, many: str) -> None:
    """Save a lock, and tell what it keeps more; ``one`` and ``many`` say how that was needed."""
    save_lock(done.lock, path)
    for name, count in done.added.items():
        kept = format_items(count, f"element that {one}", f"elements that {many}")
        show(f"{printable(name)}: keeps {kept}")
    for name, more in done.files.items():
        kept = f"all of its files: nothing tells which {many}"
        if more is not None:
            kept = format_items(more, f"file that {one}", f"files that {many}")
        show(f"{printable(name)}: keeps {kept}")
    if not (done.added or done.files):
        show(printable(f"{path}: nothing of what it removes {one}"))
    for name in done.not_locked:
        show(
            f"{printable(name)}: came back in part, and is not in the lock; negativa slim keeps "
            "what came back with --add-misses, beside --spare-never-loaded or --cpu-pages"
        )
    say_next(slim_by(path))
