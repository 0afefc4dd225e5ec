"""What the commands on slimmed libraries share: their rows, places, and the proof of a lock."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_negativa.cli.common import encode_json, say_next, show
from pytest_negativa.models.listing import LISTING_VERSION, SlimList
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.slimming import PROBLEMS, UNMET, SlimRow
from pytest_negativa.reporting.slimming import render_problems, render_rows
from pytest_negativa.reporting.text import print_error, printable

LOCK = "negativa.lock"
GOES_ON = "what is done stays done, and the same command goes on from there"
NOTHING = "nothing was changed"
PATHS = click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")


def absolute(folder: Path) -> Path:
    """The path from the root, by way of no folder that may move.

    Links stay in it: programs find spares by the name that was given.
    """
    return Path(os.path.realpath(folder)) if ".." in folder.parts else folder.absolute()


def show_proof(lock: Lock) -> None:
    """Tell what a lock doesn't rest on."""
    doubts = [(row.path, row.not_proved) for row in lock.libraries if row.not_proved is not None]
    doubts += [(f.path, f.not_proved) for f in lock.files if f.not_proved is not None]
    if not lock.proof.proved:
        reasons = printable("; ".join(lock.proof.not_proved))
        click.echo(f"negativa: warning: this lock is NOT PROVED: {reasons}", err=True)
    if lock.proof.proved and doubts:
        first = printable(": ".join(doubts[0]))
        more = f" (and {len(doubts) - 1:,} more)" if len(doubts) > 1 else ""
        click.echo(f"negativa: warning: NOT PROVED in this lock: {first}{more}", err=True)


def places(*paths: Path) -> str:
    return ", ".join(dict.fromkeys(printable(str(path)) for path in paths))


def typed(paths: Sequence[Path]) -> str:
    """The paths as words of a command."""
    return shlex.join(dict.fromkeys(map(str, paths)))


def finish(
    rows: Sequence[SlimRow],
    nothing: str,
    *,
    top: int,
    as_json: bool = False,
    stopped: bool = False,
    require: bool = False,
    nothing_done: str | None = None,
    then: str | None = None,
) -> None:
    """Print, and leave with the status that follows.

    Args:
        rows: of all libraries.
        nothing: the text if there are no rows.
        top: rows of each table; 0 for all.
        as_json: print JSON.
        stopped: nothing was done.
        require: a library that is not what was wanted is an error, too.
        nothing_done: why there was nothing to work on, which is an error.
        then: the next command, if all went well.
    """
    if as_json:
        listing = SlimList(format_version=LISTING_VERSION, libraries=tuple(rows), stopped=stopped)
        click.echo(encode_json(listing), nl=False)
    elif text := render_rows(rows, nothing, top=top):
        show(text)
    for line in render_problems(rows):
        print_error(line)
    if stopped:
        print_error("nothing was done: libraries of the lock are missing")
    if nothing_done is not None:
        print_error(nothing_done)
    problems = PROBLEMS | UNMET if require else PROBLEMS
    if stopped or nothing_done is not None or any(row.status in problems for row in rows):
        click.get_current_context().exit(1)
    if then is not None and rows and not as_json:
        say_next(then)
