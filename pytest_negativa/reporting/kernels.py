"""A list of kernels as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_negativa.models.listing import LibraryKernels, ListedKernel
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_items, format_time


def render_kernels(
    libraries: Iterable[LibraryKernels], listed: str, *, demangled: bool
) -> Iterator[str]:
    """The lines: a headline for each library, and its kernels; ``listed`` is what they are."""
    for library in libraries:
        yield f"{printable(library.path)}: {_headline(library, printable(listed))}"
        for kernel in library.kernels:
            yield from _lines(kernel, demangled=demangled)
        if library.found > len(library.kernels):
            yield f"  and {library.found - len(library.kernels):,} more"


def _headline(library: LibraryKernels, kind: str) -> str:
    if library.found == library.listed:
        return f"{library.found:,} of {library.total:,} kernels {kind}"
    kernels = f"{kind} kernels" if kind in ("used", "unused") else f"kernels {kind}"
    return f"{library.found:,} of {library.listed:,} {kernels} match"


def _lines(kernel: ListedKernel, *, demangled: bool) -> Iterator[str]:
    times = ""
    if kernel.launches is not None:
        took = "" if kernel.gpu_ns is None else f", {format_time(kernel.gpu_ns)}"
        times = f"  ({format_items(kernel.launches, 'launch', 'launches')}{took})"
    yield f"  {printable(kernel.signature if demangled else kernel.name)}{times}"
    if kernel.first is not None:
        yield f"      first used in {printable(kernel.first)}"
