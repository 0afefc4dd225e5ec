"""The report of slimming."""

from __future__ import annotations

from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.reporting.slimming import render_problems


def failed(path: str, detail: str) -> SlimRow:
    return SlimRow.unchanged(path, SlimStatus.FAILED, 1, detail)


def test_many_libraries_with_one_problem_share_a_line() -> None:
    many = [failed(f"lib{number}.so", "install it again: pip install a") for number in range(4)]
    rows = [*many, failed("one.so", "not the same"), failed("two.so", "not the same")]
    rows.append(SlimRow.unchanged("sound.so", SlimStatus.SOUND, 1, None))
    assert list(render_problems(rows)) == [
        "lib0.so and 3 more libraries: failed: install it again: pip install a",
        "one.so: failed: not the same",
        "two.so: failed: not the same",
    ]
