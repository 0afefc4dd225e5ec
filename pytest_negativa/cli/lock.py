"""``negativa lock``: a run to a lock, and one that keeps more (misses, uses)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.lock import Added, lock_run, widen_by_use, widen_lock
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
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import size
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import STDOUT


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
    help="Lock GPU code even if it is not proved; slim warns of such a lock.",
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
    by its digest and lists the GPU code that stays. If the run has all of its CPU code
    (--negativa-cpu), the lock also lists the pages that no process touched: slim puts them into
    spares, so they need no proof. Commit the lock beside the project's requirements; negativa slim
    applies it when an image is built.

    With --add-misses, the lock keeps what came back to libraries that were slimmed with a spare.
    LOG is a log, or a folder of logs: see negativa misses. PATH has the libraries with GPU code; by
    default, the active environment. What the lock removes is still what was proved, or less. With
    --add-uses, it keeps what another run used, such as the samples of a service: see negativa trace
    --attach-env. The same holds for what it removes.

    Exit status: 0, or 1 if GPU code is not proved (see --unproved) or the run can't be read.
    """
    settings = settings_of(flags)
    check_usage(
        (logs and used, "--add-misses and --add-uses: give one of them"),
        (paths and not logs, "PATH goes with --add-misses"),
    )
    if logs:
        done = widen_lock(load_lock(output), read_misses(logs), paths or active_paths())
        _save_widened(output, *done, "came back", "came back")
        return
    if used:
        runs = [runs_of(settings).find(name) for name in used]
        done = widen_by_use(load_lock(output), runs, settings)
        _save_widened(output, *done, "was used", "were used")
        return
    made = lock_run(run_of(settings), settings, unproved=unproved)
    save_lock(made, output)
    for line in _lines(made, output):
        show(printable(line), err=str(output) == STDOUT)
    show_proof(made)
    say_next(slim_by(output))


def _lines(lock: Lock, path: Path | Url) -> Iterator[str]:
    """Content of a lock, in words."""
    traced, known = (
        format_items(len(rows), "library", "libraries")
        for rows in (lock.libraries, lock.gpu_libraries)
    )
    unused = sum(row.unused_bytes for row in lock.libraries)
    trimmed = sum(row.trimmed_bytes for row in lock.libraries)
    within = f", and {format_bytes(trimmed)}, unpacked, within cubins that stay" if trimmed else ""
    if lock.gpu_libraries or not lock.has_pages:
        yield f"{path}: {known}, {format_bytes(unused)} of GPU code unused{within}"
    for row in lock.files:
        count = format_items(row.elements - row.kept_elements, "file", "files")
        yield f"{row.path}: {count} of GPU code ({format_bytes(row.unused_bytes)}) unused"
    if lock.has_pages:
        unused = sum(size(row.spans) for row in lock.libraries)
        where = "" if lock.gpu_libraries else f"{path}: "
        yield f"{where}CPU code and data: {traced}, {format_bytes(unused)} unused"
    for left in lock.left_out:
        yield f"left out: {left.path}: {left.reason}"


def _save_widened(path: Path | Url, lock: Lock, added: Added, one: str, many: str) -> None:
    """Save a lock, and tell what it keeps more; ``one`` and ``many`` say how that was needed."""
    save_lock(lock, path)
    for (name, what), count in added.items():
        kept = f"all of its {what}s: nothing tells which {many}"
        if count is not None:
            kept = format_items(count, f"{what} that {one}", f"{what}s that {many}")
        show(f"{printable(name)}: keeps {kept}")
    if not added:
        show(printable(f"{path}: nothing of what it removes {one}"))
    say_next(slim_by(path))
