"""Launches of tests, as text: a table of tests, or their ranges, libraries and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.listing import LaunchedKernel, LaunchRange, ListedTest, SimilarPair
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_count, format_items, format_time

_OUTSIDE = "(outside of ranges)"
_NO_LIBRARY = "(no library of the run)"


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


def render_ranges(tests: Sequence[ListedTest], *, top: int, demangled: bool) -> Iterator[str]:
    """The lines of a tree for each test: range, library, kernel.

    Args:
        tests: what they ran.
        top: print this many kernels of each library in a range; 0 prints all.
        demangled: print kernels by C++ signature.
    """
    tells_ranges = any(one.ranges for test in tests for one in test.by_range)
    for test in tests:
        yield f"{printable(test.test)}  {_figures(test.launches, test.gpu_ns)}"
        for one in test.by_range:
            launches, gpu_ns = total_of(one.kernels)
            name = " > ".join(map(printable, one.ranges)) or _OUTSIDE
            if tells_ranges:
                yield f"  {name}  {_figures(launches, gpu_ns)}"
            yield from _libraries(one, top, demangled=demangled)


def total_of(kernels: Sequence[LaunchedKernel]) -> tuple[int | None, int | None]:
    """Launches and GPU time in ns; None for what no kernel tells."""
    launches = [kernel.launches for kernel in kernels if kernel.launches is not None]
    times = [kernel.gpu_ns for kernel in kernels if kernel.gpu_ns is not None]
    return sum(launches) if launches else None, sum(times) if times else None


def _libraries(one: LaunchRange, top: int, *, demangled: bool) -> Iterator[str]:
    by_library: dict[tuple[str, ...], list[LaunchedKernel]] = {}
    for kernel in one.kernels:
        by_library.setdefault(kernel.libraries, []).append(kernel)
    for libraries, kernels in by_library.items():
        names = (printable(Path(path).name) for path in libraries)
        yield f"    {' or '.join(names) or _NO_LIBRARY}  {_figures(*total_of(kernels))}"
        for kernel in kernels[: top or None]:
            name = printable(kernel.signature if demangled else kernel.name)
            yield f"      {name}  {_figures(kernel.launches, kernel.gpu_ns)}"
        if top and len(kernels) > top:
            yield f"      and {len(kernels) - top:,} more"


def _figures(launches: int | None, gpu_ns: int | None) -> str:
    if launches is None:
        return "(used first; launches not counted)"
    count = format_items(launches, "launch", "launches")
    return f"({count})" if gpu_ns is None else f"({count}, {format_time(gpu_ns)})"
