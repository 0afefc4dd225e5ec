"""What a part of the tests needs, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.units import format_bytes, format_items, format_share


def render_needs(
    part: Sequence[LibraryPlan], whole: Sequence[LibraryPlan], chosen: int, tests: int
) -> Iterator[str]:
    """A headline and a table by library, the largest first.

    Args:
        part: plans for the chosen tests alone.
        whole: plans for all tests.
        chosen, tests: how many of how many tests.
    """
    code = sum(plan.code_bytes for plan in part)
    kept = sum(map(_kept, part))
    yield (
        f"{chosen:,} of {format_items(tests, 'test', 'tests')}: {format_bytes(kept)} of "
        f"{format_bytes(code)} GPU code needed ({format_share(kept, code)}), "
        f"{format_bytes(sum(map(_kept, whole)))} by all tests."
    )
    by_all = {plan.library.path: plan for plan in whole}
    rows = [
        [
            Path(plan.library.path).name,
            format_bytes(plan.code_bytes),
            format_bytes(_kept(by_all[plan.library.path])) if plan.library.path in by_all else "-",
            format_bytes(_kept(plan)),
            format_share(_kept(plan), plan.code_bytes),
            f"{len(plan.used_kernels):,}",
        ]
        for plan in sorted(part, key=lambda plan: (-_kept(plan), plan.library.path))
    ]
    headers = ("library", "GPU code", "all tests", "these tests", "", "kernels")
    yield format_table("lrrrrr", headers, rows)


def _kept(plan: LibraryPlan) -> int:
    return plan.code_bytes - plan.unused_bytes
