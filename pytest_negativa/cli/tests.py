"""The command that lists tests by what they ran: tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from pytest_negativa.cli.common import (
    answer,
    as_json_option,
    run_of,
    settings_of,
)
from pytest_negativa.cli.run_facts import how_to_trace, recorded_tests, require_launches, usage_of
from pytest_negativa.errors import OptionError
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.base import Listing
from pytest_negativa.models.coverage import KernelRun
from pytest_negativa.models.listing import (
    LISTING_VERSION,
    LaunchRange,
    ListedKernel,
    ListedTest,
    SimilarPair,
)
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.by_tests import (
    compare_groups,
    kernel_runs,
    launches_by_range,
)
from pytest_negativa.reporting.launches import (
    render_tests,
    similarity_table,
    total_of,
)
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import matches
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import Run

_T = TypeVar("_T")

# Markers of pytest's own: they say how tests run, not what they test.
_BUILT_IN_MARKERS = frozenset(
    (
        "filterwarnings",
        "parametrize",
        "skip",
        "skipif",
        "tryfirst",
        "trylast",
        "usefixtures",
        "xfail",
    )
)


@click.command()
@click.option("--kernel", "glob", metavar="GLOB", help="List only tests that ran such a kernel.")
@click.option("--test", "test_glob", metavar="GLOB", help="List only tests whose node id matches.")
@click.option(
    "--similar",
    type=click.Choice(["test", "module", "marker"]),
    help="Compare each two of them by the kernels that they ran.",
)
@as_json_option("tests")
@click_options("run", "reports.top")
def tests(
    glob: str | None,
    test_glob: str | None,
    similar: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """List the tests of a run that ran kernels, with launches and GPU time.

    Only a trace at level launch tells all tests that ran a kernel. Else a kernel is listed with the
    test that looked it up first. What a child process ran is listed with the test that started it.
    --json has the NVTX ranges, libraries and kernels of each test, too; only a trace at
    level range tells the ranges. --similar prints the Jaccard similarity: 1.00 for the same
    kernels, 0.00 for none in common; its --json has the schema similarity.

    Exit status: 0, or 1 if the run can't be read.
    """
    settings = settings_of(flags)
    run = run_of(settings)
    top = settings.reports.top
    if similar is not None:
        groups = _groups(similar, run)
        pairs = _compare(run, groups, glob)
        if not pairs:
            raise OptionError(f"--similar: fewer than two of these {similar}s ran any kernels")
        table = _first(pairs, top, partial(similarity_table, similar), "rows")
        answer(_listing(run, tuple(pairs), similar), table, as_json=as_json)
        return
    usage = usage_of(run)
    listed = _list_tests(run, usage, glob, test_glob)
    paragraphs = [*_first(listed, top, render_tests, "tests")]
    kernels = (kernel for one in listed for part in one.by_range for kernel in part.kernels)
    if not usage.launches:
        first = "A test is listed with the kernels that it looked up first"
        paragraphs.append(f"{first}; {how_to_trace(usage, 'launch')} for all.")
    elif any(kernel.launches is None for kernel in kernels):
        paragraphs.append(
            "Some processes counted no launches: their kernels are listed with the test that "
            "looked them up first."
        )
    answer(_listing(run, listed), paragraphs, as_json=as_json)


def _listing(run: Run, rows: tuple[_T, ...], listed: str | None = None) -> Listing[_T]:
    return Listing(format_version=LISTING_VERSION, run_id=run.run_id, listed=listed, rows=rows)


def _first(
    rows: Sequence[_T], top: int, render: Callable[[Sequence[_T]], str], what: str
) -> Iterator[str]:
    """The table of the first rows, and how many more there are."""
    rest = len(rows) - top if top else 0
    more = f"\n{rest:,} more {what}: --top=0 shows all" if rest > 0 else ""
    yield f"{render(rows[: top or None])}{more}"


def _list_tests(
    run: Run, usage: Usage, glob: str | None, test_glob: str | None
) -> tuple[ListedTest, ...]:
    """What each test ran of the kernels that match; the most kernels first."""
    by_test = launches_by_range(usage)
    names = {name for ranges in by_test.values() for runs in ranges.values() for name in runs}
    wanted = _wanted(glob, names)
    libraries = _libraries(run)
    tests = [test for test in by_test if test_glob is None or matches(test_glob, test)]
    if not tests and test_glob is not None:
        raise click.BadParameter(
            f"{test_glob!r} matches no test that used the GPU; negativa tests lists those",
            param_hint="--test",
        )
    listed = []
    for test, of_test in ((test, by_test[test]) for test in tests):
        ranges = [
            LaunchRange(ranges=around, kernels=found)
            for around, runs in of_test.items()
            if (found := _kernels(runs, wanted, libraries))
        ]
        kernels = [kernel for one in ranges for kernel in one.kernels]
        if not kernels:
            continue
        launches, gpu_ns = total_of(kernels)
        ranges.sort(key=lambda one: (-(total_of(one.kernels)[1] or 0), one.ranges))
        listed.append(
            ListedTest(
                test=test,
                kernels=len({kernel.name for kernel in kernels}),
                launches=launches,
                gpu_ns=gpu_ns,
                by_range=tuple(ranges),
            )
        )
    return tuple(sorted(listed, key=lambda one: (-one.kernels, one.test)))


def _kernels(
    runs: Mapping[str, KernelRun],
    wanted: Collection[str],
    libraries: Mapping[str, Sequence[str]],
) -> tuple[ListedKernel, ...]:
    """The kernels of a test in a range; those with the most GPU time first."""
    kernels = (
        ListedKernel(
            name=name,
            signature=demangle(name),
            libraries=tuple(libraries.get(name, ())),
            launches=run.launches,
            gpu_ns=run.gpu_ns,
        )
        for name, run in runs.items()
        if name in wanted
    )
    return tuple(sorted(kernels, key=lambda one: (-(one.gpu_ns or 0), one.signature)))


def _wanted(glob: str | None, names: Collection[str]) -> Collection[str]:
    """The kernels that match a glob by their mangled or demangled name.

    Raises:
        click.BadParameter: none does.
    """
    if glob is None:
        return names
    found = {name for name in names if matches(glob, name) or matches(glob, demangle(name))}
    if not found:
        raise click.BadParameter(f"{glob!r} is no used kernel", param_hint="--kernel")
    return found


def _libraries(run: Run) -> dict[str, list[str]]:
    """The libraries whose kernels of a name the run used."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for plan in load_plans(run) if run.plan_files() else ():
        for kernel in plan.used_kernels:
            found[kernel.name].append(plan.library.path)
    return found


def _groups(kind: str, run: Run) -> Mapping[str, Sequence[str]]:
    """The test itself, its module or its markers, by node id."""
    tests = recorded_tests(run)
    if kind == "test":
        return {test.nodeid: (test.nodeid,) for test in tests}
    if kind == "module":
        return {test.nodeid: (test.nodeid.partition("::")[0],) for test in tests}
    return {
        test.nodeid: [name for name in test.markers if name not in _BUILT_IN_MARKERS]
        for test in tests
    }


def _compare(run: Run, groups: Mapping[str, Sequence[str]], glob: str | None) -> list[SimilarPair]:
    usage = usage_of(run)
    require_launches(run, usage)
    runs = kernel_runs(usage, usage.iter_images())
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in _wanted(glob, runs):
        for one in runs[name]:
            for group in groups.get(one.test, ()):  # none: a fixture or a phase of the session
                found[group].add(name)
    return compare_groups(found)
