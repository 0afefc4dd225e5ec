"""Thresholds."""

from __future__ import annotations

import msgspec
import pytest

from pytest_negativa.models.settings import (
    Thresholds,
)


def limits(**given: float) -> Thresholds:
    return msgspec.convert({**dict.fromkeys(Thresholds.__struct_fields__), **given}, Thresholds)


FACTS = {"gpu_code": 1000, "unused_bytes": 900, "kernels": 200, "used_kernels": 30}


@pytest.mark.parametrize(
    ("name", "fails", "passes", "message"),
    [
        ("max_unused_percent", 89.9, 90.0,
         "max_unused_percent: 90.0% of the GPU code is unused, the limit is 89.9%"),
        ("min_used_kernels", 31, 30,
         "min_used_kernels: 30 kernels are used, the limit is 31"),
        ("min_used_kernels_percent", 15.1, 15.0,
         "min_used_kernels_percent: 15.0% of the kernels are used, the limit is 15.1%"),
        ("max_gpu_code", 999, 1000,
         "max_gpu_code: there are 1,000 bytes of GPU code, the limit is 999 bytes"),
    ],
)  # fmt: skip
def test_thresholds(name: str, fails: float, passes: float, message: str) -> None:
    assert limits().crossed(**FACTS) == ()
    assert limits(**{name: fails}).crossed(**FACTS) == (message,)
    assert limits(**{name: passes}).crossed(**FACTS) == ()


def test_all_crossed_thresholds_are_named() -> None:
    strict = limits(
        max_unused_percent=0, min_used_kernels=50, min_used_kernels_percent=100, max_gpu_code=0
    )
    assert len(strict.crossed(**FACTS)) == 4
    nothing = dict.fromkeys(FACTS, 0)
    (only,) = strict.crossed(**nothing)
    assert only.startswith("min_used_kernels: 0 kernels")
