"""GPU code that a part of the tests needs, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.models.listing import NeedList
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes, format_items, format_share


def render_needs(needs: NeedList) -> Iterator[str]:
    """A headline and a table by library."""
    code = sum(one.gpu_code for one in needs.libraries)
    kept = sum(one.these_tests for one in needs.libraries)
    yield (
        f"{needs.chosen:,} of {format_items(needs.tests, 'test', 'tests')}: {format_bytes(kept)} "
        f"of {format_bytes(code)} GPU code needed ({format_share(kept, code)}), "
        f"{format_bytes(needs.all_tests)} by all tests."
    )
    rows = [
        [
            Path(one.path).name,
            format_bytes(one.gpu_code),
            "-" if one.all_tests is None else format_bytes(one.all_tests),
            format_bytes(one.these_tests),
            format_share(one.these_tests, one.gpu_code),
            f"{one.used_kernels:,}",
        ]
        for one in needs.libraries
    ]
    headers = ("library", "GPU code", "all tests", "these tests", "", "kernels")
    yield format_table("lrrrrr", headers, rows, drop=(5, 4, 1, 2))
    if needs.plan is not None:
        yield printable(f"Plan in {needs.plan}")
