"""``negativa kernels``, ``tests`` (--similar) and ``needs``: by which tests."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.cli.common import (
    MATCH,
    answer,
    as_json_option,
    check_usage,
    encode_json,
    say_next,
    settings_and_run,
)
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.base import Listing
from pytest_negativa.models.coverage import KernelRun
from pytest_negativa.models.listing import (
    LaunchRange,
    LibraryKernels,
    ListedKernel,
    ListedTest,
    NeededLibrary,
    NeedList,
    SimilarPair,
)
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.by_tests import (
    compare_groups,
    kernel_runs,
    kernels_of_tests,
    launches_by_range,
    select_tests,
    usage_of_tests,
)
from pytest_negativa.reporting.listings import (
    render_kernels,
    render_needs,
    render_tests,
    similarity_table,
    total_of,
)
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import and_more
from pytest_negativa.settings.flags import click_options
from pytest_negativa.settings.globs import GlobSet, LibraryNames, matches, matches_library
from pytest_negativa.storage.results import (
    load_healed,
    load_opened,
    load_plans,
    load_tests,
    load_usage,
)
from pytest_negativa.storage.runs import Run

_T = TypeVar("_T")

_HOW_TO_TRACE = "trace, or record for a replay, with --negativa-level=launch"

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
@click.option("--used", is_flag=True, help="List the used kernels, with the first test of each.")
@click.option(
    "--library",
    "glob",
    metavar="GLOB",
    default="*",
    help="List only kernels of these libraries: path, file name or soname.",
)
@MATCH
@click.option("--test", metavar="GLOB", help="List only kernels that such tests ran.")
@as_json_option("kernels")
@click_options("run")
def kernels(
    used: bool,
    glob: str,
    globs: tuple[str, ...],
    test: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """List the unused kernels of a traced run, or the used ones.

    The list covers the kernels that the run's devices could load. The run must have a plan.
    --test lists what tests launched if the trace is of level launch, else what they used first.
    """
    _settings, run = settings_and_run(flags)
    plans = _plans_of(run, glob)
    listed = "used" if used else "unused"
    runs: Mapping[str, KernelRun] | None = None
    if test is not None:
        usage = _usage_of(run)
        if not (runs := kernels_of_tests(usage, test)):
            raise click.BadParameter(
                f"{test!r} ran no kernel; negativa tests lists the tests that did",
                param_hint="--test",
            )
        listed = f"{'run' if usage.launches else 'used first'} by {test}"
    wanted = GlobSet(globs)
    libraries = (_list(plan, runs, wanted, used=used) for plan in plans)
    # A test uses few of many libraries.
    listing = _listing(run, tuple(one for one in libraries if one.kernels or test is None), listed)
    lines = render_kernels(listing.rows, listed)
    if as_json:
        click.echo(encode_json(listing), nl=False)
    else:
        # A kernel is a line, however narrow the terminal is.
        click.echo("".join(f"{line}\n" for line in lines), nl=False)
        say_next(run)


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


def _list(
    plan: LibraryPlan,
    runs: Mapping[str, KernelRun] | None,
    wanted: GlobSet,
    *,
    used: bool,
) -> LibraryKernels:
    if runs is not None:
        listed = [
            _listed(use.name, runs[use.name]) for use in plan.used_kernels if use.name in runs
        ]
    elif used:
        listed = [_listed(use.name, first=str(use.first)) for use in plan.used_kernels]
    else:
        listed = list(map(_listed, plan.unused_kernels))
    found = [one for one in listed if not wanted.globs or wanted.match(one.name, one.signature)]
    return LibraryKernels(
        path=plan.library.path,
        total=len(plan.used_kernels) + len(plan.unused_kernels),
        listed=len(listed),
        kernels=tuple(found),
    )


def _listed(
    name: str,
    run: KernelRun | None = None,
    libraries: Sequence[str] = (),
    first: str | None = None,
) -> ListedKernel:
    return ListedKernel(
        name=name,
        signature=demangle(name),
        libraries=tuple(libraries),
        first=first,
        launches=None if run is None else run.launches,
        gpu_ns=None if run is None else run.gpu_ns,
    )


@click.command()
@click.option("--kernel", "glob", metavar="GLOB", help="List only tests that ran such a kernel.")
@click.option(
    "--similar",
    type=click.Choice(["test", "module", "marker"]),
    help="Compare each two of them by the kernels that they ran.",
)
@as_json_option("tests")
@click_options("run", "reports.top")
def tests(
    glob: str | None,
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
    settings, run = settings_and_run(flags)
    top = settings.reports.top
    if similar is not None:
        pairs = _compare(run, _groups(similar, run), glob)
        if not pairs:
            raise OptionError(f"--similar: fewer than two of these {similar}s ran any kernels")
        table = _first(pairs, top, partial(similarity_table, similar), "rows")
        answer(_listing(run, tuple(pairs), similar), table, as_json=as_json, then=run)
        return
    usage = _usage_of(run)
    listed = _list_tests(run, usage, glob)
    paragraphs = [*_first(listed, top, render_tests, "tests")]
    if any(k.launches is None for one in listed for part in one.by_range for k in part.kernels):
        paragraphs.append(
            "A process that counted no launches has its kernels listed with the test that looked "
            f"them up first; {_HOW_TO_TRACE} for all."
        )
    answer(_listing(run, listed), paragraphs, as_json=as_json, then=run)


def _listing(run: Run, rows: tuple[_T, ...], listed: str | None = None) -> Listing[_T]:
    return Listing(run_id=run.run_id, listed=listed, rows=rows)


def _first(
    rows: Sequence[_T], top: int, render: Callable[[Sequence[_T]], str], what: str
) -> Iterator[str]:
    """The table of the first rows, and how many more there are."""
    more = and_more(len(rows), top, f"{{}} more {what}: --top=0 shows all")
    yield "\n".join((render(rows[: top or None]), *more))


def _list_tests(run: Run, usage: Usage, glob: str | None) -> tuple[ListedTest, ...]:
    """The kernels that match and that each test ran; the most kernels first."""
    by_test = launches_by_range(usage)
    names = {name for ranges in by_test.values() for runs in ranges.values() for name in runs}
    wanted = _wanted(glob, names)
    libraries = _libraries(run)
    listed = []
    for test, of_test in by_test.items():
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
        _listed(name, run, libraries.get(name, ())) for name, run in runs.items() if name in wanted
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
    tests = _recorded_tests(run)
    if kind == "test":
        return {test.nodeid: (test.nodeid,) for test in tests}
    if kind == "module":
        return {test.nodeid: (test.nodeid.partition("::")[0],) for test in tests}
    return {
        test.nodeid: [name for name in test.markers if name not in _BUILT_IN_MARKERS]
        for test in tests
    }


def _compare(run: Run, groups: Mapping[str, Sequence[str]], glob: str | None) -> list[SimilarPair]:
    usage = _usage_of(run, with_launches=True)
    runs = kernel_runs(usage, usage.iter_images())
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in _wanted(glob, runs):
        for one in runs[name]:
            for group in groups.get(one.test, ()):  # none: a fixture or a phase of the session
                found[group].add(name)
    return compare_groups(found)


@click.command()
@click.argument("nodeids", nargs=-1, metavar="[NODEID]...")
@click.option("-m", "markers", metavar="EXPR", help="Take only tests whose markers match.")
@click.option("-k", "keywords", metavar="EXPR", help="Take only tests whose names match.")
@as_json_option("needs")
@click_options("run")
def needs(
    nodeids: tuple[str, ...],
    markers: str | None,
    keywords: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show the GPU code that a part of the tests needs alone.

    The tests don't run again: the run must be a trace at level launch. NODEID is a test, or a
    class, file or folder of tests, as pytest prints it. What belongs to no test counts for every
    test: imports, shared fixtures, variables, child processes.

    Exit status: 0, or 1 if the run can't be read or has counted no launches.
    """
    check_usage((not (nodeids or markers or keywords), "name tests: NODEID, -m EXPR or -k EXPR"))
    settings, run = settings_and_run(flags)
    usage = _usage_of(run, with_launches=True)
    # Nothing tells which test opened a file that is GPU code.
    plans = tuple(plan for plan in load_plans(run) if not plan.is_files)
    recorded = _recorded_tests(run)
    chosen = select_tests(recorded, markers=markers, keywords=keywords, nodeids=nodeids)
    names = {test.nodeid for test in chosen}
    part = analyze(
        usage_of_tests(usage, names),
        settings,
        healed=load_healed(run),
        watched=load_opened(run),
    )
    listing = NeedList(
        run_id=run.run_id,
        chosen=len(chosen),
        tests=len(recorded),
        all_tests=sum(plan.kept_bytes for plan in plans),
        libraries=_needed([one.plan for one in part.libraries if not one.plan.is_files], plans),
    )
    selected = [
        *nodeids,
        *(("-m", markers) if markers else ()),
        *(("-k", keywords) if keywords else ()),
    ]
    then = run if usage.replay else shlex.join(["pytest", "--negativa", *selected])
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


def _usage_of(run: Run, *, with_launches: bool = False) -> Usage:
    """The usage of a planned run.

    Raises:
        StoreError: it has no plan, can't be read, or counted none of the launches that are needed.
    """
    usage = load_usage(run)
    if usage is None:
        raise StoreError(run.why_unplanned())
    if with_launches and not usage.launches:
        raise StoreError(
            f"{run}: counted no launches, so which tests ran a kernel is unknown; {_HOW_TO_TRACE}"
        )
    return usage


def _recorded_tests(run: Run) -> tuple[TestResult, ...]:
    """The tests of the run.

    Raises:
        StoreError: it has none, or their file can't be read.
    """
    if not (tests := load_tests(run)):
        raise StoreError(f"{run}: tells no tests; trace them with pytest --negativa")
    return tests
