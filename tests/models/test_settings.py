"""Thresholds."""

from __future__ import annotations

import pytest

from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.settings import Coverage, Limits, crossed_thresholds

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
    assert crossed_thresholds({}, **FACTS) == ()
    assert crossed_thresholds({name: fails}, **FACTS) == (message,)
    assert crossed_thresholds({name: passes}, **FACTS) == ()


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
    assert coverage_limit(None).crossed(libraries) == ()
    assert coverage_limit(50).crossed(libraries) == ()
    assert coverage_limit(50.1).crossed(libraries) == (
        "fail_under: 50.0% (4 of 8) of the project's kernels looked up, the limit is 50.1%",
    )


def test_a_percentage_is_told_on_its_side_of_the_limit() -> None:
    libraries = (covered("a.so", 2, 13),)
    (line,) = coverage_limit(15.39).crossed(libraries)
    # 15.3846%: rounded to one decimal it would be above the limit.
    assert "fail_under: 15.38% (2 of 13)" in line
    (line,) = crossed_thresholds(
        {"max_unused_percent": 93.91}, gpu_code=10_000, unused_bytes=9_394, used_kernels=0
    )
    assert line.startswith("max_unused_percent: 93.94% of")


def test_kernel_coverage_of_one_library_below_its_limit() -> None:
    line = "fail_under: 75.0% (3 of 4) of b.so looked up, the limit is 75.5%"
    for limit, crossed in ((75, ()), (75.5, (line,))):
        found = coverage_limit(None).crossed((covered("a.so", 1, 4), covered("b.so", 3, 4, limit)))
        assert found == crossed


def test_a_limit_on_nothing_is_crossed() -> None:
    for libraries in ((), (covered("a.so", 0, 0),)):
        (line,) = coverage_limit(1).crossed(libraries)
        assert line.startswith("fail_under: no loaded library of the project has kernels")
