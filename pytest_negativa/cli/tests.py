"""The commands that tell tests apart: tests, needs."""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.cli.common import (
    as_json_option,
    encode_json,
    run_of,
    settings_of,
    show,
    warn_of_hooks,
)
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.reporting.text import printable
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_negativa.models.coverage import KernelRun
    from pytest_negativa.models.listing import (
        LaunchedKernel,
        ListedTest,
        NeededLibrary,
        SimilarPair,
    )
    from pytest_negativa.models.outcomes import TestResult
    from pytest_negativa.models.plan import LibraryPlan
    from pytest_negativa.models.trace import Usage
    from pytest_negativa.planning.by_tests import Likeness
    from pytest_negativa.storage.runs import Run

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
@click.option("--ranges", is_flag=True, help="Print the ranges, libraries and kernels of each.")
@click.option(
    "--similar",
    type=click.Choice(["test", "module", "marker"]),
    help="Compare each two of them by the kernels that they ran.",
)
@click.option("--functions", is_flag=True, help="Compare by functions of CPU code instead.")
@as_json_option("tests")
@click_options("run", "reports.top", "reports.demangle")
def tests(
    glob: str | None,
    test_glob: str | None,
    ranges: bool,
    similar: str | None,
    functions: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """List the tests of a run that ran kernels, with launches and GPU time.

    Only a trace at level launch tells all tests that ran a kernel. Else a kernel is listed with the
    test that looked it up first. So are the kernels of child processes, whose launches no level
    counts. --ranges prints a tree: test, NVTX ranges, library, kernel. It takes a trace at level
    launch, and only one at level range tells the ranges. --similar prints the Jaccard similarity:
    1.00 for the same kernels, 0.00 for none in common; its --json has the schema similarity.
    --functions compares by the functions of CPU code on touched pages. It takes a trace with --cpu
    at level launch, and no GPU.

    Exit status: 0, or 1 if the run can't be read.
    """
    from pytest_negativa.models.listing import LISTING_VERSION, SimilarityList, TestList
    from pytest_negativa.reporting.launches import render_ranges, render_tests
    from pytest_negativa.reporting.tables import format_table

    if functions and (similar is None or glob is not None):
        raise click.UsageError("--functions needs --similar, and takes no --kernel")
    settings = settings_of(flags)
    run = run_of(settings)
    top = settings.reports.top
    if similar is not None:
        groups = _groups(similar, run)
        alike = _functions_alike(run, groups) if functions else _kernels_alike(run, groups, glob)
        code = "functions" if functions else "kernels"
        pairs = _pairs(alike, code, f"{similar}s")
        if as_json:
            compared = SimilarityList(
                format_version=LISTING_VERSION,
                run_id=run.run_id,
                compared=similar,
                code=code,
                pairs=pairs,
            )
            click.echo(encode_json(compared), nl=False)
            return
        shown = [
            (one.left, one.right, f"{one.shared:,}", f"{one.either:,}", f"{one.similarity:.2f}")
            for one in pairs[: top or None]
        ]
        headers = (similar, "", "shared", "either", "similarity")
        show(format_table("llrrr", headers, shown, drop=(3, 2), names=(0, 1)))
        _tell_rest(len(pairs) - len(shown), "rows")
        return
    usage = _usage(run)
    if ranges and not usage.launches:
        raise StoreError(
            f"{run}: counted no launches, which have the ranges; {_trace(usage, 'range')}"
        )
    listed = _list_tests(run, usage, glob, test_glob)
    if as_json:
        listing = TestList(format_version=LISTING_VERSION, run_id=run.run_id, tests=listed)
        click.echo(encode_json(listing), nl=False)
        return
    first = listed[: top or None]
    if ranges:
        for line in render_ranges(first, top=top, demangled=settings.reports.demangle):
            click.echo(line)
    else:
        show(render_tests(first))
    _tell_rest(len(listed) - len(first), "tests")
    if not usage.launches:
        how = _trace(usage, "launch")
        show(f"A test is listed with the kernels that it looked up first; {how} for all.")
        return
    if ranges and not usage.ranges:
        how = _trace(usage, "range")
        show(f"The trace has no ranges; {how}, in a program that names them.")
    kernels = (kernel for one in listed for part in one.by_range for kernel in part.kernels)
    if any(kernel.launches is None for kernel in kernels):
        show(
            "Launches of child processes are not counted: their kernels are listed with the test "
            "that looked them up first."
        )


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
    from pytest_negativa.analysis.analyze import analyze
    from pytest_negativa.analysis.code_files import watched_files
    from pytest_negativa.models.listing import LISTING_VERSION, NeedList
    from pytest_negativa.planning.by_tests import usage_of_tests
    from pytest_negativa.planning.select_tests import resolve_nodeids, select_tests
    from pytest_negativa.reporting.needs import render_needs
    from pytest_negativa.reporting.units import format_items
    from pytest_negativa.storage.results import load_healed, load_plans
    from pytest_negativa.storage.runs import RunsFolder

    if not (nodeids or markers or keywords):
        raise click.UsageError("name tests: NODEID, -m EXPR or -k EXPR")
    settings = settings_of(flags)
    run = run_of(settings)
    usage = _usage(run)
    plans = load_plans(run)
    _require_launches(run, usage)
    recorded = _recorded(run)
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
        watched=watched_files(run),
    )
    new = RunsFolder(Path(settings.directory)).new_run() if write else None
    listing = NeedList(
        format_version=LISTING_VERSION,
        run_id=run.run_id,
        chosen=len(chosen),
        tests=len(recorded),
        all_tests=sum(plan.kept_bytes for plan in plans),
        libraries=_needed([one.plan for one in part.libraries], plans),
        plan=None if new is None else str(new),
    )
    if not as_json:
        show("\n\n".join(render_needs(listing)))
    if new is not None:
        from pytest_negativa.analysis.finish import write_results
        from pytest_negativa.storage.outcomes import copy_outcomes

        warn_of_hooks([run])
        words = ["pytest", "--negativa-verify", f"--negativa-run={new}"]
        if (failure := run.failure) is not None:
            new.mark_failed(f"{run}: {failure}")
            words.append("--negativa-accept-failed")
        of_tests = (
            f"{len(chosen):,} of {format_items(len(recorded), 'test', 'tests')} of {run.run_id}"
        )
        write_results(new, part, settings, part=of_tests)
        copy_outcomes(run.outcomes_file, new.outcomes_file, names)
        words += nodeids
        words += ["-m", markers] if markers else []
        words += ["-k", keywords] if keywords else []
        if not as_json:
            click.echo("\n" + printable(f"Plan in {new}. Prove it: {shlex.join(words)}"))
    if as_json:
        click.echo(encode_json(listing), nl=False)


def _needed(part: Sequence[LibraryPlan], whole: Sequence[LibraryPlan]) -> tuple[NeededLibrary, ...]:
    """What the plans for the chosen tests keep, compared with the plans for all tests."""
    from pytest_negativa.models.listing import NeededLibrary

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


def _usage(run: Run) -> Usage:
    from pytest_negativa.storage.results import load_usage

    usage = load_usage(run)
    if usage is None:
        raise StoreError(run.why_unplanned())
    return usage


def _recorded(run: Run) -> tuple[TestResult, ...]:
    """The tests of the run.

    Raises:
        StoreError: it has none, or their file can't be read.
    """
    from pytest_negativa.storage.results import load_tests

    if not (tests := load_tests(run)):
        raise StoreError(f"{run}: tells no tests; trace them with pytest --negativa")
    return tests


def _require_launches(run: Run, usage: Usage) -> None:
    if not usage.launches:
        raise StoreError(
            f"{run}: counted no launches, so which tests ran a kernel is unknown; "
            f"{_trace(usage, 'launch')}"
        )


def _trace(usage: Usage, level: str) -> str:
    """What to do for a trace of a level."""
    how = f"--negativa-level={level}"
    if usage.replay is None:
        return f"trace with {how}"
    return f"this run replays a recording, so make a new recording with {how}"


def _list_tests(
    run: Run, usage: Usage, glob: str | None, test_glob: str | None
) -> tuple[ListedTest, ...]:
    """What each test ran of the kernels that match; the most kernels first."""
    from pytest_negativa.models.listing import LaunchRange, ListedTest
    from pytest_negativa.planning.by_tests import launches_by_range
    from pytest_negativa.reporting.launches import total_of
    from pytest_negativa.settings.globs import matches

    by_test = launches_by_range(usage)
    names = {name for ranges in by_test.values() for runs in ranges.values() for name in runs}
    wanted = _wanted(glob, names)
    libraries = _libraries(run)
    listed = []
    for test, of_test in by_test.items():
        if test_glob is not None and not matches(test_glob, test):
            continue
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
) -> tuple[LaunchedKernel, ...]:
    """The kernels of a test in a range; those with the most GPU time first."""
    from pytest_negativa.gpucode.demangle import demangle
    from pytest_negativa.models.listing import LaunchedKernel

    kernels = (
        LaunchedKernel(
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
    from pytest_negativa.gpucode.demangle import demangle
    from pytest_negativa.settings.globs import matches

    if glob is None:
        return names
    found = {name for name in names if matches(glob, name) or matches(glob, demangle(name))}
    if not found:
        raise click.BadParameter(f"{glob!r} is no used kernel", param_hint="--kernel")
    return found


def _libraries(run: Run) -> dict[str, list[str]]:
    """The libraries whose kernels of a name the run used."""
    from pytest_negativa.storage.results import load_plans

    found: defaultdict[str, list[str]] = defaultdict(list)
    for plan in load_plans(run) if run.plan_files() else ():
        for kernel in plan.used_kernels:
            found[kernel.name].append(plan.library.path)
    return found


def _tell_rest(rest: int, what: str) -> None:
    if rest:
        click.echo(f"{rest:,} more {what}: --top=0 shows all")


def _groups(kind: str, run: Run) -> Mapping[str, Sequence[str]]:
    """The test itself, its module or its markers, by node id."""
    tests = _recorded(run)
    if kind == "test":
        return {test.nodeid: (test.nodeid,) for test in tests}
    if kind == "module":
        return {test.nodeid: (test.nodeid.partition("::")[0],) for test in tests}
    return {
        test.nodeid: [name for name in test.markers if name not in _BUILT_IN_MARKERS]
        for test in tests
    }


def _kernels_alike(
    run: Run, groups: Mapping[str, Sequence[str]], glob: str | None
) -> list[Likeness]:
    from pytest_negativa.planning.by_tests import compare_groups, kernel_runs

    usage = _usage(run)
    _require_launches(run, usage)
    runs = kernel_runs(usage, usage.iter_images())
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in _wanted(glob, runs):
        for one in runs[name]:
            for group in groups.get(one.test, ()):  # none: a fixture or a phase of the session
                found[group].add(name)
    return compare_groups(found)


def _functions_alike(run: Run, groups: Mapping[str, Sequence[str]]) -> list[Likeness]:
    from pytest_negativa.hostcode.by_tests import functions_by_group
    from pytest_negativa.hostcode.gather import gather_by_test
    from pytest_negativa.planning.by_tests import compare_bits

    pages = gather_by_test(run)
    if pages is None or not pages.by_test:
        raise StoreError(
            f"{run}: CPU code was not traced by test; trace with --negativa-cpu and "
            "--negativa-level=launch"
        )
    return compare_bits(functions_by_group(pages.by_test, lambda test: groups.get(test, ())))


def _pairs(alike: Iterable[Likeness], code: str, what: str) -> tuple[SimilarPair, ...]:
    from pytest_negativa.models.listing import SimilarPair

    pairs = tuple(
        SimilarPair(
            left=one.left,
            right=one.right,
            shared=one.shared,
            either=one.either,
            similarity=one.jaccard,
        )
        for one in alike
    )
    if not pairs:
        raise OptionError(f"--similar: fewer than two of these {what} ran any {code}")
    return pairs
