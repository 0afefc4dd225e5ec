"""Makes the edits that remove unused code, from a map and a plan: zeros, and new headers.

The rules are what a driver (580, lazy and eager loading) and ``cuobjdump`` 13 were seen to accept:

- A region without kept code goes as a whole, with its header.
- Unused elements at a region's end are cut off: the region's header states the smaller size.
- Padding between removed code is zeros anyway, and goes with it.
- Elsewhere a run of unused elements becomes one element. Its header has 64 bytes and states a kind
  that doesn't exist, and readers step over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pytest_negativa.gpucode.fatbin import (
    ELEMENT_HEADER,
    ELEMENT_VERSION,
    OVERWRITTEN_KIND,
    REGION_HEADER,
    REGION_SIZE_OFFSET,
    ElementHeader,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Element, LibraryMap, Region, Section
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import Range
from pytest_negativa.rewriting.compact.records import CannotCompactError
from pytest_negativa.rewriting.edits import Change, Edits, Fill, Patch

# Regions, frames and their sections are aligned to 64 bytes at most in all known libraries.
_LONGEST_PADDING = 256

WhyKept = Callable[[int, int], str | None]
"""Tells why a range of addresses must stay as it is, or None."""


def plan_removal(
    source: ByteSource,
    library_map: LibraryMap,
    plan: LibraryPlan,
    why_kept: WhyKept,
) -> tuple[Edits, tuple[str, ...]]:
    """The edits that remove unused code: fills of zeros, which may leave the file, and new headers.

    Args:
        source: the library; only padding is read.
        library_map: of the library.
        plan: decisions on elements and frames; a missing decision means kept.
        why_kept: asked for each range before it changes.

    Returns:
        The edits, and notes on unused code that is not removed.

    Raises:
        CannotCompactError: the map contradicts itself.
    """
    planner = _Planner(source, plan, why_kept)
    for section in library_map.sections:
        planner.add_section(section)
    return planner.removal()


def removable_code(source: ByteSource, library_map: LibraryMap, plan: LibraryPlan) -> list[Range]:
    """The ranges of unused code whose bytes may come back, for a library with a spare.

    A region without kept code goes as a whole. From another one only payloads go: the driver reads
    the headers of all its elements, so these stay.

    Args:
        source: the library; only padding is read.
        library_map: of the library.
        plan: decisions on elements and frames; a missing decision means kept.

    Returns:
        Ranges of file offsets, ascending. Neighbours with padding between them are one.
    """
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    unused -= {(d.start, d.end) for d in plan.decisions if d.kept}
    found: list[Range] = []
    for section in library_map.sections:
        for region in section.regions:
            spans = [e.payload for e in region.elements]
            if spans and unused.issuperset(spans):
                found.append(region.span)
            else:
                found += unused.intersection(spans)
        found += unused.intersection(frame.span for frame in section.frames)
    joined: list[Range] = []
    for start, end in sorted(found):
        if joined and _is_zeros(source, joined[-1][1], start):
            joined[-1] = joined[-1][0], end
        elif start < end:
            joined.append((start, end))
    return joined


def _is_zeros(source: ByteSource, start: int, end: int) -> bool:
    """Whether there is nothing but padding between two offsets."""
    return end - start <= _LONGEST_PADDING and (
        start >= end or not any(source.read(start, end - start))
    )


class _Planner:
    def __init__(self, source: ByteSource, plan: LibraryPlan, why_kept: WhyKept) -> None:
        self._source = source
        self._unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
        # Of two decisions on the same bytes, keeping wins.
        self._unused -= {(d.start, d.end) for d in plan.decisions if d.kept}
        self._why_kept = why_kept
        self._zeros: list[Range] = []
        self._changes: list[Change] = []
        self._guarded: list[str] = []

    def add_section(self, section: Section) -> None:
        shift = section.vaddr - section.span.start
        for region in section.regions:
            unused = [e.payload in self._unused for e in region.elements]
            if any(unused) and not self._is_guarded(*region.span, shift):
                self._add_region(region, unused)
        for frame in section.frames:
            if frame.span in self._unused and not self._is_guarded(*frame.span, shift):
                self._zeros.append(frame.span)
        self._changes += (Fill(start, end, 0) for start, end in self._with_padding(shift))
        self._zeros = []

    def _with_padding(self, shift: int) -> list[Range]:
        """The zeros of a section; neighbours are united if only padding is between them."""
        zeros: list[Range] = []
        for start, end in sorted(self._zeros):
            if start == end:
                continue
            if zeros and self._is_padding(zeros[-1][1], start, shift):
                zeros[-1] = zeros[-1][0], end
            else:
                zeros.append((start, end))
        return zeros

    def _is_padding(self, start: int, end: int, shift: int) -> bool:
        if start == end:
            return True
        if not _is_zeros(self._source, start, end):
            return False
        return self._why_kept(start + shift, end + shift) is None

    def removal(self) -> tuple[Edits, tuple[str, ...]]:
        try:
            edits = Edits.of(self._source.size, self._changes)
        except ValueError as e:
            raise CannotCompactError(self._source.path, f"its map contradicts itself: {e}") from e
        if not self._guarded:
            return edits, ()
        note = (
            f"{len(self._guarded):,} unused regions or frames stay as they are, because "
            f"the library itself uses their bytes: {self._guarded[0]}"
        )
        return edits, (note,)

    def _is_guarded(self, start: int, end: int, shift: int) -> bool:
        reason = self._why_kept(start + shift, end + shift)
        if reason is not None:
            self._guarded.append(f"at offset {start:#x}, {reason}")
        return reason is not None

    def _add_region(self, region: Region, unused: Sequence[bool]) -> None:
        start, end = region.span
        if all(unused):
            self._zeros.append((start, end))
            return
        for run in _runs(region.elements, unused):
            run_start, run_end = run[0].header_offset, run[-1].payload.end
            if run_end == end:
                size = run_start - start - REGION_HEADER.size
                self._changes.append(Patch(start + REGION_SIZE_OFFSET, size.to_bytes(8, "little")))
                self._zeros.append((run_start, run_end))
            else:
                header = _filler(run_end - run_start)
                self._changes.append(Patch(run_start, header))
                self._zeros.append((run_start + len(header), run_end))


def _runs(elements: Sequence[Element], unused: Sequence[bool]) -> Iterator[list[Element]]:
    run: list[Element] = []
    for element, is_unused in zip(elements, unused, strict=True):
        if is_unused:
            run.append(element)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _filler(size: int) -> bytes:
    """The header of an element of an unknown kind; ``size`` in bytes, with the header."""
    header_size = ELEMENT_HEADER.size
    return ELEMENT_HEADER.pack(
        ElementHeader(OVERWRITTEN_KIND, ELEMENT_VERSION, header_size, size - header_size)
    )
