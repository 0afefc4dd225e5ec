"""Makes the edits that remove unused code, from a map and a plan: zeros, and new headers.

The rules are what a driver (580, lazy and eager loading) and ``cuobjdump`` 13 were seen to accept:

- A region without kept code goes as a whole, with its header.
- Unused elements at a region's end are cut off: the region's header states the smaller size.
- Padding between removed code is zeros anyway, and goes with it.
- Elsewhere a run of unused elements becomes one element. Its header has 64 bytes and states a kind
  that doesn't exist, and readers step over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from pytest_negativa.gpucode.fatbin import (
    ELEMENT_HEADER,
    ELEMENT_VERSION,
    OVERWRITTEN_KIND,
    REGION_HEADER,
    REGION_SIZE_OFFSET,
    ElementHeader,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap, Region
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import Range
from pytest_negativa.rewriting.compact.records import CannotCompactError
from pytest_negativa.rewriting.edits import Change, Edits, Fill, Patch

# Regions, frames and their sections are aligned to 64 bytes at most in all known libraries.
_LONGEST_PADDING = 256


def plan_removal(source: ByteSource, library_map: LibraryMap, plan: LibraryPlan) -> Edits:
    """The edits that remove unused code: fills of zeros, which may leave the file, and new headers.

    Args:
        source: the library; only padding is read.
        library_map: of the library.
        plan: decisions on elements and frames; a missing decision means kept.

    Raises:
        CannotCompactError: the map contradicts itself.
    """
    gone = _unused(plan)
    zeros: list[Range] = []
    changes: list[Change] = []
    for region in library_map.iter_regions():
        for change in _region_changes(region, [e.payload in gone for e in region.elements]):
            if isinstance(change, Patch):
                changes.append(change)
            else:
                zeros.append(change)
    zeros += gone.intersection(frame.span for frame in library_map.iter_frames())
    changes += (Fill(start, end, 0) for start, end in _joined(source, zeros))
    try:
        return Edits.of(source.size, changes)
    except ValueError as e:
        raise CannotCompactError(source.path, f"its map contradicts itself: {e}") from e


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
    unused = _unused(plan)
    found: list[Range] = []
    for region in library_map.iter_regions():
        spans = [e.payload for e in region.elements]
        if spans and unused.issuperset(spans):
            found.append(region.span)
        else:
            found += unused.intersection(spans)
    found += unused.intersection(frame.span for frame in library_map.iter_frames())
    return _joined(source, found)


def _unused(plan: LibraryPlan) -> set[Range]:
    """The unused ranges; of two decisions on the same bytes, keeping wins."""
    kept = {(d.start, d.end) for d in plan.decisions if d.kept}
    return {(d.start, d.end) for d in plan.decisions if not d.kept} - kept


def _joined(source: ByteSource, ranges: Iterable[Range]) -> list[Range]:
    """The ranges, ascending; neighbours are one if there is only padding between them."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        if joined and _is_zeros(source, joined[-1][1], start):
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _is_zeros(source: ByteSource, start: int, end: int) -> bool:
    """Whether there is nothing but padding between two offsets."""
    return end - start <= _LONGEST_PADDING and (
        start >= end or not any(source.read(start, end - start))
    )


def _region_changes(region: Region, unused: Sequence[bool]) -> Iterator[Range | Patch]:
    """Ranges that become zeros, and new headers."""
    start, end = region.span
    if unused and all(unused):
        yield start, end
        return
    pairs = zip(region.elements, unused, strict=True)
    for is_unused, found in itertools.groupby(pairs, key=itemgetter(1)):
        if not is_unused:
            continue
        run = [element for element, _ in found]
        run_start, run_end = run[0].header_offset, run[-1].payload.end
        if run_end == end:
            size = run_start - start - REGION_HEADER.size
            yield Patch(start + REGION_SIZE_OFFSET, size.to_bytes(8, "little"))
            yield run_start, run_end
        else:
            header = _filler(run_end - run_start)
            yield Patch(run_start, header)
            yield run_start + len(header), run_end


def _filler(size: int) -> bytes:
    """The header of an element of an unknown kind; ``size`` in bytes, with the header."""
    header_size = ELEMENT_HEADER.size
    return ELEMENT_HEADER.pack(
        ElementHeader(OVERWRITTEN_KIND, ELEMENT_VERSION, header_size, size - header_size)
    )
