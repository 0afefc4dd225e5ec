"""Tests and what they launched, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_negativa.models.listing import ListedKernel, ListedTest, SimilarPair
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.units import format_count, format_time


def render_tests(tests: Sequence[ListedTest]) -> str:
    """A table with a row for each test."""
    rows = [
        (one.test, f"{one.kernels:,}", format_count(one.launches), format_time(one.gpu_ns))
        for one in tests
    ]
    headers = ("test", "kernels", "launches", "GPU time")
    return format_table("lrrr", headers, rows, drop=(2, 1))


def similarity_table(compared: str, pairs: Sequence[SimilarPair]) -> str:
    """A table with a row for each two; ``compared`` is what they are, such as ``test``."""
    rows = [
        (one.left, one.right, f"{one.shared:,}", f"{one.either:,}", f"{one.similarity:.2f}")
        for one in pairs
    ]
    headers = (compared, "", "shared", "either", "similarity")
    return format_table("llrrr", headers, rows, drop=(3, 2), names=(0, 1))


def total_of(kernels: Sequence[ListedKernel]) -> tuple[int | None, int | None]:
    """Launches and GPU time in ns; None for what no kernel tells."""
    launches = [kernel.launches for kernel in kernels if kernel.launches is not None]
    times = [kernel.gpu_ns for kernel in kernels if kernel.gpu_ns is not None]
    return sum(launches) if launches else None, sum(times) if times else None
