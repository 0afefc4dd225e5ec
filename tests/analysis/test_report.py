"""Limits that a report finds crossed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import build_report
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.report import RunReport
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
