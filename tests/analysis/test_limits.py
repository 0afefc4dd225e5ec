"""Limits that a run crosses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.limits import crossed_coverage, crossed_thresholds
from pytest_negativa.analysis.report import build_report
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import Coverage, Limits
from tests.support.analyses import settings, used
from tests.support.libraries import MULTIARCH


def report(folder: Path, text: str) -> RunReport:
    options = settings(folder, text)
    analysis = analyze(used(MULTIARCH, regions=(1,)), options)
    return build_report(analysis, options, run_id="run", directory="run", files=())


@pytest.mark.parametrize(
    ("section", "limit"),
    [
        ("coverage: {fail_under", "0"),
        ("thresholds: {max_unused_percent", "100"),
        ("thresholds: {min_used_kernels", "0"),
        ("thresholds: {max_gpu_code", "1 GB"),
        ("compare: {baseline: b.json, fail", "size:0%"),
    ],
)
def test_a_limit_of_no_library_is_crossed(tmp_path: Path, section: str, limit: str) -> None:
    def unmatched(glob: str, more: str = "") -> list[str]:
        found = report(tmp_path, f"{section}: '{glob}={limit}'}}{more}")
        return [line for line in found.crossed if " of this run" in line]

    [line] = unmatched("libmultiarc.so")
    assert line.endswith("of this run; did you mean libmultiarch.so?")
    assert unmatched("libmultiarch.so") == []
    # A library that is not analysed is not checked.
    assert unmatched("libmultiarch.so", "\nlibraries: {exclude: ['*']}")


_LEFT_OUT = ["left out by libraries.include: libmultiarch.so"]


@pytest.mark.parametrize(
    ("libraries", "told"),
    [
        ("include: [libmultiarc.so]", ["'libmultiarc.so' matches no library", *_LEFT_OUT]),
        ("include: [libmultiarch.so, libother.so]", ["'libother.so' matches no library"]),
        (
            "include: [libmulti*], exclude: ['*']",
            ["left out by libraries.include and libraries.exclude: libmultiarch.so"],
        ),
    ],
)
@pytest.mark.parametrize("limit", ["max_unused_percent: 100", "max_gpu_code: 1 GB"])
def test_limits_that_count_less_than_is_asked_for_are_crossed(
    tmp_path: Path, libraries: str, told: list[str], limit: str
) -> None:
    text = f"libraries: {{{libraries}}}\n"
    without = report(tmp_path, text)
    assert without.crossed == ()
    assert all(any(one in line for line in without.warnings) for one in told)

    found = report(tmp_path, f"{text}thresholds: {{{limit}}}")
    assert len(found.crossed) == len(told)
    assert all(one in line for one, line in zip(told, found.crossed, strict=True))
    assert found.warnings == ()


def test_the_project_s_kernels_without_a_library_of_its_own_cross_a_limit(tmp_path: Path) -> None:
    limit = "coverage: {fail_under: 0, libraries: [libmultiarch.so%s]}"
    assert report(tmp_path, limit % "").crossed == ()
    [line] = report(tmp_path, limit % ", libother.so").crossed
    assert "coverage.libraries: 'libother.so' matches no library" in line


@pytest.mark.parametrize("limit", ["coverage: {fail_under", "thresholds: {min_used_kernels"])
def test_a_limit_on_kernels_of_files_that_are_gpu_code_is_crossed(
    tmp_path: Path, limit: str
) -> None:
    options = settings(tmp_path, f"{limit}: 'dist:some-kernels=0'}}")
    analysis = analyze(used(MULTIARCH, regions=(1,)), options, watched=[FILES])
    found = build_report(analysis, options, run_id="run", directory="run", files=())
    assert [line for line in found.crossed if " of this run" in line]


FILES = WatchedFiles(
    distribution="some-kernels",
    version="1.0",
    site="/site",
    digest="0",
    files={"kernels/a.cubin": ("sha256=a", 1000), "kernels/b.cubin": ("sha256=b", 3000)},
    opened=("kernels/a.cubin",),
)


def test_limits_count_files_that_are_gpu_code(tmp_path: Path) -> None:
    def crossed(text: str) -> list[str]:
        options = settings(tmp_path, text)
        analysis = analyze(used(MULTIARCH, regions=(1,)), options, watched=[FILES])
        found = build_report(analysis, options, run_id="run", directory="run", files=())
        return [line.partition(":")[0] for line in found.crossed]

    libraries = report(tmp_path, "").code_bytes
    assert crossed(f"thresholds: {{max_gpu_code: {libraries + 4000}}}") == []
    assert crossed(f"thresholds: {{max_gpu_code: {libraries + 3999}}}") == ["max_gpu_code"]
    limit = "thresholds: {max_gpu_code: 'dist:Some_Kernels=3999'}"
    assert crossed(limit) == ["some-kernels (files)"]
    assert crossed("thresholds: {max_unused_percent: 'dist:some-kernels=75'}") == []
    left_out = "libraries: {exclude: ['kernels/*']}"
    assert crossed(f"thresholds: {{max_gpu_code: {libraries}}}\n{left_out}") == []


FACTS = {"gpu_code": 1000, "unused_bytes": 900, "used_kernels": 30}


@pytest.mark.parametrize(
    ("name", "fails", "passes", "message"),
    [
        ("max_unused_percent", 89.9, 90.0,
         "max_unused_percent: 90.0% of the GPU code is unused, the limit is 89.9%"),
        ("max_unused_percent", 89.999999999, 90.000000001,
         "max_unused_percent: 90.0% of the GPU code is unused, the limit is 89.999999999%"),
        ("min_used_kernels", 31, 30,
         "min_used_kernels: 30 kernels are used, the limit is 31"),
        ("max_gpu_code", 999, 1000,
         "max_gpu_code: there are 1,000 bytes of GPU code, the limit is 999 bytes"),
    ],
)  # fmt: skip
def test_thresholds(name: str, fails: float, passes: float, message: str) -> None:
    assert not [*crossed_thresholds({}, **FACTS)]
    assert [*crossed_thresholds({name: fails}, **FACTS)] == [message]
    assert not [*crossed_thresholds({name: passes}, **FACTS)]


def covered(name: str, run: int, kernels: int, limit: float | None = None) -> LibraryCoverage:
    return LibraryCoverage(
        path=f"/project/{name}",
        kernels=tuple(
            KernelCoverage(
                name=str(n), scope="", template="k", runs=(KernelRun("t", None),) if n < run else ()
            )
            for n in range(kernels)
        ),
        counted=False,
        limit=limit,
    )


def coverage_limit(fail_under: float | None) -> Coverage:
    return Coverage(libraries=(), fail_under=Limits(overall=fail_under, libraries={}))


def test_kernel_coverage_below_its_limit() -> None:
    libraries = (covered("a.so", 1, 4), covered("b.so", 3, 4))
    assert not [*crossed_coverage(coverage_limit(None), libraries)]
    assert not [*crossed_coverage(coverage_limit(50), libraries)]
    assert [*crossed_coverage(coverage_limit(50.1), libraries)] == [
        "fail_under: 50.0% (4 of 8) of the project's kernels looked up, the limit is 50.1%",
    ]


def test_a_percentage_is_told_on_its_side_of_the_limit() -> None:
    libraries = (covered("a.so", 2, 13),)
    (line,) = crossed_coverage(coverage_limit(15.39), libraries)
    # 15.3846%: rounded to one decimal it would be above the limit.
    assert "fail_under: 15.38% (2 of 13)" in line
    (line,) = crossed_thresholds(
        {"max_unused_percent": 93.91}, gpu_code=10_000, unused_bytes=9_394, used_kernels=0
    )
    assert line.startswith("max_unused_percent: 93.94% of")


def test_kernel_coverage_of_one_library_below_its_limit() -> None:
    line = "fail_under: 75.0% (3 of 4) of b.so looked up, the limit is 75.5%"
    for limit, crossed in ((75, []), (75.5, [line])):
        libraries = covered("a.so", 1, 4), covered("b.so", 3, 4, limit)
        assert [*crossed_coverage(coverage_limit(None), libraries)] == crossed


def test_a_limit_on_nothing_is_crossed() -> None:
    for libraries in ((), (covered("a.so", 0, 0),)):
        (line,) = crossed_coverage(coverage_limit(1), libraries)
        assert line.startswith("fail_under: no loaded library of the project has kernels")
