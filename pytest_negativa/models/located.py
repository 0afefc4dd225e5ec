"""A library's map with what the run used of it: between trace and plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_negativa.models.base import Record
from pytest_negativa.models.library import Element, LibraryIdentity, LibraryMap
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import FirstUse, ImageUse, TracedLibrary, Usage


class UseMark(Record, frozen=True, kw_only=True):
    """Use of a region or frame by the run.

    Attributes:
        kernels: the kernels that were looked up, by mangled name.
        whole: all its kernels count as used, see ``ImageUse.whole``.
        first: where the image was first seen.
        prelinked: file offsets of the relocatable regions that the driver could link this one from.
        functions: mangled names of device functions whose address the program looked up.
    """

    kernels: Mapping[str, FirstUse]
    whole: bool
    first: FirstUse
    prelinked: tuple[int, ...] = ()
    functions: frozenset[str] = frozenset()


class LocatedLibrary(Record, frozen=True, kw_only=True):
    """A library with its use.

    Attributes:
        uses: what the run used, by the file offset at which the region or frame begins.
        usage: of the run.
        changed: why this is not the library that was traced; None if it is.
        unmatched: images that the run loaded from the library and that its map doesn't explain.
        suspects: images that were found in memory and may be the content of an element, by its
            header offset.
        touched: pages that were read, see ``LibraryUsage``; none if headers of all regions were.
    """

    library_map: LibraryMap
    uses: Mapping[int, UseMark]
    usage: Usage
    changed: str | None
    unmatched: tuple[str, ...]
    suspects: Mapping[int, ImageUse]
    touched: tuple[Span, ...] = ()

    def use_of(self, block: Element) -> UseMark | None:
        """Use of an element's region, or of a frame; None: not used."""
        return self.uses.get(block.anchor)


def may_be(traced: TracedLibrary, library: LibraryIdentity) -> bool:
    """Whether a traced file had the content of a library, by digest or else size and build id."""
    if traced.sha256 is not None and library.sha256 is not None:
        return traced.sha256 == library.sha256
    return (traced.size, traced.build_id) == (library.size, library.build_id)


def earliest(uses: Iterable[Mapping[str, FirstUse]]) -> dict[str, FirstUse]:
    """All kernels of ``uses``, each with the earliest of its first uses."""
    found: dict[str, FirstUse] = {}
    for kernels in uses:
        for name, first in kernels.items():
            if name not in found or first.time_ns < found[name].time_ns:
                found[name] = first
    return found
