"""The commands that look after traced runs: runs list, show, delete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.cli.common import named_run, run_of, settings_of
from pytest_negativa.errors import StoreError
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_negativa.storage.runs import Run

_FOLDER_OPTIONS = ("config", "directory")


@click.group()
def runs() -> None:
    """List, show and delete traced runs.

    Exit status: 0, or 1 if a run can't be read or deleted.
    """


@runs.command("list")
@click_options(*_FOLDER_OPTIONS)
def list_runs(**flags: Any) -> None:
    """List the traced runs, the newest first.

    Exit status: 0.
    """
    from pytest_negativa.reporting.tables import format_table
    from pytest_negativa.reporting.units import format_bytes
    from pytest_negativa.storage.runs import RunsFolder

    folder = RunsFolder(Path(settings_of(flags).directory))
    found = folder.runs()
    if not found:
        click.echo(f"no traced run in {folder.folder}")
        return
    latest = folder.latest.resolve()
    rows = [
        (
            run.run_id,
            "latest" if run.folder.resolve() == latest else "",
            _state(run),
            format_bytes(_size(run.folder)),
        )
        for run in found
    ]
    click.echo(format_table("lllr", ("run", "", "state", "size"), rows))
    if folder.copies.is_dir():
        click.echo(f"\ncopies of libraries: {format_bytes(_size(folder.copies))}")


@runs.command()
@click.argument("run", required=False, metavar="[RUN]")
@click_options(*_FOLDER_OPTIONS)
def show(run: str | None, **flags: Any) -> None:
    """Show a run: its command, tests, devices, libraries and verdict.

    RUN is an id that list prints, or a folder; without it, the last run. Exit status: 0, or 1 if
    the run can't be read.
    """
    settings = settings_of(flags)
    named = run_of(settings) if run is None else named_run(run, settings)
    for line in _describe(named):
        click.echo(line)


@runs.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Delete all but N runs.")
@click.option("--copies", is_flag=True, help="Delete the copies of libraries, too.")
@click_options(*_FOLDER_OPTIONS)
def delete(runs: tuple[str, ...], keep: int | None, copies: bool, **flags: Any) -> None:
    """Delete runs, and the copies that verifications wrote.

    RUN is an id that list prints, or a folder. --keep N keeps the newest N. A run or copies in use
    stay. Verify a run again, and the copies are written anew.

    Exit status: 0, or 1 if a run could not be deleted.
    """
    from pytest_negativa.storage.runs import RunsFolder

    settings = settings_of(flags)
    folder = RunsFolder(Path(settings.directory))
    doomed = [named_run(run, settings) for run in runs]
    if keep is not None:
        doomed += [run for run in folder.runs()[keep:] if run not in doomed]
    if not doomed and not copies:
        if keep is None:
            raise click.UsageError("name a RUN, or give --keep or --copies")
        click.echo("no run to delete")
    for run in doomed:
        run.delete()
        click.echo(f"deleted {run}")
    if copies:
        _delete_copies(folder.copies)


def _describe(run: Run) -> Iterator[str]:
    import shlex
    from collections import Counter

    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_bytes, format_items, format_share
    from pytest_negativa.storage.outcomes import read_outcomes
    from pytest_negativa.storage.results import load_plans, load_usage

    yield f"run       {run}"
    yield f"state     {printable(_state(run))}"
    if run.outcomes_file.exists():
        session = read_outcomes(run.outcomes_file)
        yield f"command   {printable(shlex.join(session.command))}"
        counts = Counter(test.outcome.value for test in session.tests)
        outcomes = ", ".join(f"{n:,} {outcome}" for outcome, n in counts.items())
        yield f"tests     {outcomes or 'none'}"
    if (usage := load_usage(run)) is not None:
        names = dict.fromkeys(f"{d.name} ({d.compute_capability})" for d in usage.devices)
        yield f"devices   {printable(', '.join(names)) or 'none'}"
        yield f"processes {len(usage.processes):,}"
    if run.plan_files():
        plans = load_plans(run)
        unused = sum(plan.unused_bytes for plan in plans)
        code = sum(plan.code_bytes for plan in plans)
        yield (
            f"planned   {format_items(len(plans), 'library', 'libraries')}: "
            f"{format_bytes(unused)} of {format_bytes(code)} of GPU code unused "
            f"({format_share(unused, code)})"
        )
    yield f"size      {format_bytes(_size(run.folder))}"


def _state(run: Run) -> str:
    """How far a run came."""
    from pytest_negativa.storage.results import load_verdict

    if (failure := run.failure) is not None:
        return f"failed: {failure}"
    if (reason := run.incomplete_reason) is not None:
        return f"incomplete: {reason}"
    try:
        verdict = load_verdict(run)
    except StoreError:
        return "its verdict can't be read"
    if verdict is not None:
        return "proved" if verdict.proved else "not proved"
    return "planned" if run.plan_files() else "traced"


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _delete_copies(root: Path) -> None:
    """Delete what the manifest of copies names; the rest of the folder stays."""
    from pytest_negativa.rewriting.reconstruct import reconstruct

    if root.is_dir():
        reconstruct((), root)
        click.echo(f"deleted the copies in {root}")
    else:
        click.echo(f"no copies in {root}")
