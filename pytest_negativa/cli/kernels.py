"""The command that lists the kernels of a run: kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pytest_negativa.cli.common import (
    MATCH,
    TOP_KERNELS,
    as_json_option,
    encode_json,
    run_of,
    settings_of,
)
from pytest_negativa.cli.run_facts import usage_of
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.base import Listing
from pytest_negativa.models.coverage import KernelRun
from pytest_negativa.models.listing import LISTING_VERSION, LibraryKernels, ListedKernel
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.planning.by_tests import kernels_of_test
from pytest_negativa.reporting.kernels import render_kernels
from pytest_negativa.reporting.text import printable
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import GlobSet, LibraryNames, matches_library
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import Run


@click.command()
@click.option("--used", is_flag=True, help="List the used kernels, with the first test of each.")
@click.option(
    "--library",
    "glob",
    metavar="GLOB",
    default="*",
    help="List only kernels of these libraries: path, file name or soname.",
)
@MATCH
@click.option("--test", metavar="NODEID", help="List only kernels that this test ran.")
@TOP_KERNELS
@as_json_option("kernels")
@click_options("run", "reports.demangle")
def kernels(
    used: bool,
    glob: str,
    globs: tuple[str, ...],
    test: str | None,
    top: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """List the unused kernels of a traced run, or the used ones.

    The list covers the kernels that the run's devices could load. The run must have a plan.
    --test lists what a test launched if the trace is of level launch, else what it used first.
    """
    settings = settings_of(flags)
    run = run_of(settings)
    plans = _plans_of(run, glob)
    listed = "used" if used else "unused"
    launches: Mapping[str, KernelRun] | None = None
    if test is not None:
        launches, how = _launches(run, test)
        listed = f"{how} by {test}"
    wanted = GlobSet(globs)
    libraries = tuple(_list(plan, launches, wanted, top, used=used) for plan in plans)
    listing = Listing(
        format_version=LISTING_VERSION,
        run_id=run.run_id,
        listed=listed,
        # A test uses few of many libraries.
        rows=tuple(one for one in libraries if one.found or test is None),
    )
    if as_json:
        click.echo(encode_json(listing), nl=False)
        return
    for line in render_kernels(listing.rows, listed, demangled=settings.reports.demangle):
        click.echo(line)


def _plans_of(run: Run, glob: str) -> list[LibraryPlan]:
    plans = [plan for plan in load_plans(run) if not plan.is_files]
    wanted = [
        plan
        for plan in plans
        if matches_library(glob, LibraryNames(plan.library.path, plan.library.soname))
    ]
    if not wanted:
        there = ", ".join(printable(Path(plan.library.path).name) for plan in plans)
        raise click.BadParameter(
            f"{glob!r} is none of the run's libraries: {there}", param_hint="--library"
        )
    return wanted


def _launches(run: Run, test: str) -> tuple[Mapping[str, KernelRun], str]:
    """The kernels of a test, and the words for how it used them."""
    usage = usage_of(run)
    launches = kernels_of_test(usage, test)
    if launches is None:
        raise click.BadParameter(
            f"{test!r} is no test that used the GPU; negativa tests lists those",
            param_hint="--test",
        )
    return launches, "run" if usage.launches else "used first"


def _list(
    plan: LibraryPlan,
    launches: Mapping[str, KernelRun] | None,
    wanted: Any,
    top: int,
    *,
    used: bool,
) -> LibraryKernels:
    kernels = tuple(_kernels(plan, launches, used=used))
    found = [
        kernel
        for kernel in kernels
        if not wanted.globs or wanted.match(kernel.name, kernel.signature)
    ]
    return LibraryKernels(
        path=plan.library.path,
        total=len(plan.used_kernels) + len(plan.unused_kernels),
        listed=len(kernels),
        found=len(found),
        kernels=tuple(found[: top or None]),
    )


def _kernels(
    plan: LibraryPlan, launches: Mapping[str, KernelRun] | None, *, used: bool
) -> Iterator[ListedKernel]:
    if launches is None and not used:
        for name in plan.unused_kernels:
            yield ListedKernel(name=name, signature=demangle(name))
        return
    for kernel in plan.used_kernels:
        signature = demangle(kernel.name)
        if launches is None:
            first = str(kernel.first)
            yield ListedKernel(name=kernel.name, signature=signature, first=first)
        elif kernel.name in launches:
            run = launches[kernel.name]
            yield ListedKernel(
                name=kernel.name, signature=signature, launches=run.launches, gpu_ns=run.gpu_ns
            )
