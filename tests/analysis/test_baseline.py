"""A run against its baseline: each limit on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.limits import Growth, compare_reports, compare_with_baseline
from pytest_negativa.analysis.report import rows_of
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import Compare, GrowthLimit, Limits
from pytest_negativa.planning.difference import compare, make_baseline, side_of_report
from pytest_negativa.storage.records import write_record
from tests.support.analyses import settings, used
from tests.support.code_files import planned_files
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.reports import report

NAME = QUICKSTART_LIBRARY.name


def limits(**given: str | float) -> tuple[GrowthLimit, ...]:
    """Limits by figure: ``size="5%"``."""
    return tuple(
        GrowthLimit(
            figure=figure.replace("_", "-"),
            limit=float(str(limit).rstrip("%")),
            is_percent=str(limit).endswith("%"),
        )
        for figure, limit in given.items()
    )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[AnalyzedLibrary, ...]:
    """One library of the project: 88,744 bytes, 67,200 of GPU code, 60,216 unused."""
    folder = tmp_path_factory.mktemp("analysis")
    options = settings(folder, f"coverage: {{libraries: [{NAME}]}}")
    return analyze(used(QUICKSTART_LIBRARY, regions=(0, 1, 2)), options).libraries


def report_of(libraries: Sequence[AnalyzedLibrary]) -> RunReport:
    covered = tuple(one.coverage for one in libraries if one.coverage is not None)
    return report(*rows_of(libraries), coverage=covered)


def before(
    libraries: Sequence[AnalyzedLibrary],
    *kernels: str,
    code: int = 0,
    unused: int = 0,
    size: int = 0,
) -> RunReport:
    """A baseline with these kernels, and smaller by these figures."""
    baseline = make_baseline(report_of(libraries))
    [row], [covered] = baseline.libraries, baseline.coverage
    largest, *others = sorted(row.unused, key=lambda part: -part.bytes)
    return replace(
        baseline,
        libraries=(
            replace(
                row,
                size=row.size - size,
                code_bytes=row.code_bytes - code,
                unused=(replace(largest, bytes=largest.bytes - unused), *others),
            ),
        ),
        coverage=(
            replace(covered, kernels=tuple(KernelCoverage(name=k, runs=()) for k in kernels)),
        ),
    )


def grown(old: RunReport, libraries: Sequence[AnalyzedLibrary], wanted: Compare) -> Growth:
    return compare_reports(old, report_of(libraries), libraries, wanted)


def compared(
    baseline: str, overall: tuple[GrowthLimit, ...], libraries: dict[str, tuple[GrowthLimit, ...]]
) -> Compare:
    return Compare(baseline=baseline, fail=Limits(overall=overall, libraries=libraries))


@pytest.mark.parametrize("figure", ["size", "code", "unused"])
def test_growth_in_bytes(libraries: tuple[AnalyzedLibrary, ...], figure: str) -> None:
    old = before(libraries, code=10, unused=10, size=10)
    for limit, is_crossed in ((10, False), (9, True)):
        for wanted in (
            compared("b", limits(**{figure: limit}), {}),
            compared("b", (), {"*": limits(**{figure: limit})}),
        ):
            crossed = grown(old, libraries, wanted).crossed
            assert bool(crossed) == is_crossed
            assert all(f"{figure} grew" in line and "the limit is 9 B" in line for line in crossed)


def test_growth_in_percent(libraries: tuple[AnalyzedLibrary, ...]) -> None:
    old = before(libraries, code=67200 // 2)
    for limit, is_crossed in (("100%", False), ("99.9%", True)):
        wanted = compared("b", limits(code=limit), {})
        crossed = grown(old, libraries, wanted).crossed
        assert bool(crossed) == is_crossed
    assert crossed == (
        "compare.fail: code grew: 33.6 kB -> 67.2 kB (+33.6 kB, +100.0%), the limit is 99.9%",
    )


def test_what_was_nothing_grows_by_more_than_any_percentage(
    libraries: tuple[AnalyzedLibrary, ...],
) -> None:
    nothing = report()
    wanted = compared("b", limits(code="500%"), {NAME: limits(size="500%")})
    found = grown(nothing, libraries, wanted)
    assert len(found.crossed) == 2
    assert found.lines[1].startswith(f"{NAME}: GPU code appeared with 67.2 kB")
    # Less is never a fault.
    larger = before(libraries, code=-1, unused=-1, size=-1)
    assert grown(larger, libraries, wanted).crossed == ()


def test_new_kernels_without_a_test(libraries: tuple[AnalyzedLibrary, ...]) -> None:
    [one] = libraries
    assert one.coverage is not None
    kernels = tuple(
        KernelCoverage(name=name, runs=(KernelRun("t", None),) if name == "run" else ())
        for name in ("known", "new1", "new2", "run")
    )
    covered = replace(one.coverage, kernels=kernels)
    names = tuple(kernel.name for kernel in kernels)
    plan = replace(one.plan, used_kernels=(), unused_kernels=names)
    changed = (AnalyzedLibrary(one.library_map, plan, covered),)
    old = before(libraries, "known")
    for limit, is_crossed in ((2, False), (1, True)):
        wanted = compared("b", limits(new_kernels_untested=limit), {})
        found = grown(old, changed, wanted)
        assert bool(found.crossed) == is_crossed
        assert found.lines[-1] == "2 new kernels without a test"
    assert found.crossed == (
        "compare.fail: 2 new kernels are untested (new1, new2), the limit is 1",
    )


def test_a_library_that_is_covered_later_has_no_new_kernels(
    libraries: tuple[AnalyzedLibrary, ...],
) -> None:
    [one] = libraries
    old = make_baseline(report_of([replace_coverage(one, None)]))
    strict = limits(new_kernels_untested=0)
    wanted = compared("b", strict, {"*": strict})
    found = grown(old, libraries, wanted)
    assert found.crossed == ()
    assert found.lines[-1].startswith(f"{NAME}: the baseline lists no kernels of it")


def test_a_baseline_is_small_and_equals_its_run(
    libraries: tuple[AnalyzedLibrary, ...], tmp_path: Path
) -> None:
    write_record(tmp_path / "b.json", make_baseline(report_of(libraries)))
    assert (tmp_path / "b.json").stat().st_size < 2500
    strict = limits(size=0, code="0%", unused=0, new_kernels_untested=0)
    wanted = compared(str(tmp_path / "b.json"), strict, {})
    assert compare_with_baseline(report_of(libraries), libraries, wanted).crossed == ()


def replace_coverage(one: AnalyzedLibrary, coverage: LibraryCoverage | None) -> AnalyzedLibrary:
    return AnalyzedLibrary(one.library_map, one.plan, coverage)


@pytest.mark.parametrize("text", [None, "{}", '{"format": 99}'])
def test_a_baseline_that_cannot_be_read_opens_no_gate(
    libraries: tuple[AnalyzedLibrary, ...], tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "b.json"
    if text is not None:
        path.write_text(text)
    wanted = compared(str(path), (), {})
    [line] = compare_with_baseline(report_of(libraries), libraries, wanted).crossed
    assert line.startswith(f"compare.baseline: {path}: ")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "is_crossed"), [(1000, False), (1001, True)])
def test_files_that_are_gpu_code_grow_like_a_library(
    libraries: tuple[AnalyzedLibrary, ...], size: int, is_crossed: bool
) -> None:
    old = make_baseline(report_of([*libraries, files_of_size(1000)]))
    strict = limits(code=0)
    wanted = compared("b", strict, {"dist:some_kernels": strict})
    crossed = grown(old, [*libraries, files_of_size(size)], wanted).crossed
    assert len(crossed) == 2 * is_crossed


def test_files_of_a_distribution_in_two_sites_are_two() -> None:
    other = files_of_size(2000, "/other")
    old, new = (side_of_report(report_of([files_of_size(size), other])) for size in (1000, 1500))
    assert sorted(change.code.growth for change in compare(old, new)) == [0, 500]


def files_of_size(size: int, site: str = "/site") -> AnalyzedLibrary:
    return planned_files({"k/a.cubin": 400}, {"k/b.cubin": size - 400}, site=site)
