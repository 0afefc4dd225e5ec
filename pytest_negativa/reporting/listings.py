"""``negativa kernels``, ``tests`` and ``needs`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.listing import (
    LibraryKernels,
    ListedKernel,
    ListedTest,
    NeedList,
    SimilarPair,
)
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import (
    format_count,
    format_items,
    format_share,
    format_time,
)


def render_kernels(libraries: Iterable[LibraryKernels], listed: str) -> Iterator[str]:
    """The lines: a headline for each library, and its kernels; ``listed`` is what they are."""
    for library in libraries:
        yield f"{printable(library.path)}: {_headline(library, printable(listed))}"
        for kernel in library.kernels:
            yield from _lines(kernel)


def _headline(library: LibraryKernels, kind: str) -> str:
    found = len(library.kernels)
    if found == library.listed:
        return f"{found:,} of {library.total:,} kernels {kind}"
    kernels = f"{kind} kernels" if kind in ("used", "unused") else f"kernels {kind}"
    return f"{found:,} of {library.listed:,} {kernels} match"


def _lines(kernel: ListedKernel) -> Iterator[str]:
    times = ""
    if kernel.launches is not None:
        took = "" if kernel.gpu_ns is None else f", {format_time(kernel.gpu_ns)}"
        times = f"  ({format_items(kernel.launches, 'launch', 'launches')}{took})"
    yield f"  {printable(kernel.signature)}{times}"
    if kernel.first is not None:
        yield f"      first used in {printable(kernel.first)}"


def render_tests(tests: Sequence[ListedTest]) -> str:
    """A table with a row for each test."""
    rows = [
        (one.test, f"{one.kernels:,}", format_count(one.launches), format_time(one.gpu_ns))
        for one in tests
    ]
    return format_table("lrrr", ("test", "kernels", "launches", "GPU time"), rows, drop=(2, 1))


def similarity_table(compared: str, pairs: Sequence[SimilarPair]) -> str:
    """A table with a row for each two; ``compared`` is what they are, such as ``test``."""
    rows = [
        (one.left, one.right, f"{one.shared:,}", f"{one.either:,}", f"{one.similarity:.2f}")
        for one in pairs
    ]
    return format_table(
        "llrrr",
        (compared, "", "shared", "either", "similarity"),
        rows,
        drop=(3, 2),
        names=(0, 1),
    )


def total_of(kernels: Sequence[ListedKernel]) -> tuple[int | None, int | None]:
    """Launches and GPU time in ns; None for what no kernel tells."""
    launches = [kernel.launches for kernel in kernels if kernel.launches is not None]
    times = [kernel.gpu_ns for kernel in kernels if kernel.gpu_ns is not None]
    return sum(launches) if launches else None, sum(times) if times else None


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
    yield format_table(
        "lrrrrr",
        ("library", "GPU code", "all tests", "these tests", "", "kernels"),
        rows,
        drop=(5, 4, 1, 2),
    )
