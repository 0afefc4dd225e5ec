"""The command that shows what a part of the tests needs: needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import write_results
from pytest_negativa.cli.common import (
    answer,
    as_json_option,
    run_of,
    settings_of,
)
from pytest_negativa.cli.plan_run import warn_of_hooks
from pytest_negativa.cli.run_facts import recorded_tests, require_launches, usage_of
from pytest_negativa.errors import StoreError
from pytest_negativa.models.listing import LISTING_VERSION, NeededLibrary, NeedList
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.planning.by_tests import usage_of_tests
from pytest_negativa.planning.select_tests import resolve_nodeids, select_tests
from pytest_negativa.reporting.needs import render_needs
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.flags import click_options
from pytest_negativa.storage.outcomes import copy_outcomes
from pytest_negativa.storage.results import load_healed, load_opened, load_plans
from pytest_negativa.storage.runs import Run, RunsFolder


@click.command()
@click.argument("nodeids", nargs=-1, metavar="[NODEID]...")
@click.option("-m", "markers", metavar="EXPR", help="Take only tests whose markers match.")
@click.option("-k", "keywords", metavar="EXPR", help="Take only tests whose names match.")
@click.option("--plan", "write", is_flag=True, help="Write a plan for these tests: a new run.")
@as_json_option("needs")
@click_options("run")
def needs(
    nodeids: tuple[str, ...],
    markers: str | None,
    keywords: str | None,
    write: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show the GPU code that a part of the tests needs alone.

    The tests don't run again: the run must be a trace at level launch. NODEID is a test, or a
    class, file or folder of tests. What belongs to no test counts for every test: imports, shared
    fixtures, variables, child processes. --plan writes a plan; verify it with the same selection.
    The plan of a failed run is marked as failed, too.

    Exit status: 0, or 1 if the run can't be read or has counted no launches.
    """
    if not (nodeids or markers or keywords):
        raise click.UsageError("name tests: NODEID, -m EXPR or -k EXPR")
    settings = settings_of(flags)
    run = run_of(settings)
    usage = usage_of(run)
    # Nothing tells which test opened a file that is GPU code.
    plans = tuple(plan for plan in load_plans(run) if not plan.is_files)
    require_launches(run, usage)
    recorded = recorded_tests(run)
    if write and not run.outcomes_file.exists():
        raise StoreError(
            f"{run}: --plan takes the run of one session: nothing proves a plan for tests of "
            "several"
        )
    root = usage.processes[0].header.root
    wanted = resolve_nodeids(nodeids, recorded, root=Path(root), cwd=Path.cwd())
    chosen = select_tests(recorded, markers=markers, keywords=keywords, nodeids=wanted)
    names = {test.nodeid for test in chosen}
    part = analyze(
        usage_of_tests(usage, names),
        settings,
        healed=load_healed(run),
        watched=load_opened(run),
    )
    new = RunsFolder(Path(settings.directory)).new_run() if write else None
    listing = NeedList(
        format_version=LISTING_VERSION,
        run_id=run.run_id,
        chosen=len(chosen),
        tests=len(recorded),
        all_tests=sum(plan.kept_bytes for plan in plans),
        libraries=_needed([one.plan for one in part.libraries if not one.plan.is_files], plans),
        plan=None if new is None else str(new),
    )
    then: Run | str = "the same command with --plan" if usage.replay is None else run
    if new is not None:
        warn_of_hooks([run])
        words = ["pytest", "--negativa-verify", f"--negativa-run={new}"]
        of_tests = (
            f"{len(chosen):,} of {format_items(len(recorded), 'test', 'tests')} of {run.run_id}"
        )
        write_results(new, part, settings, part=of_tests)
        copy_outcomes(run.outcomes_file, new.outcomes_file, names)
        words += nodeids
        words += ["-m", markers] if markers else []
        words += ["-k", keywords] if keywords else []
        then = shlex.join(words)
    answer(listing, render_needs(listing), as_json=as_json, then=then)


def _needed(part: Sequence[LibraryPlan], whole: Sequence[LibraryPlan]) -> tuple[NeededLibrary, ...]:
    """The code that the chosen tests need, beside that of all tests."""
    by_all = {plan.library.path: plan.kept_bytes for plan in whole}
    needed = (
        NeededLibrary(
            path=plan.library.path,
            gpu_code=plan.code_bytes,
            all_tests=by_all.get(plan.library.path),
            these_tests=plan.kept_bytes,
            used_kernels=len(plan.used_kernels),
        )
        for plan in part
    )
    return tuple(sorted(needed, key=lambda one: (-one.these_tests, one.path)))
