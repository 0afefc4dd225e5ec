"""Edits of unused code: overwritten (0x01), removed (zeros), or taken out of cubins.

Overwriting reads no library bytes. An unused element keeps its header, so the chain of its region
stays sound. Its payload is filled, and its kind and arch become values that the driver never looks
for. With ``CUDA_MODULE_LOADING=EAGER`` the driver picks the element that fits the device from every
region, and fails on a damaged one. An unused frame has no header of a region, and is filled as a
whole.

Removed code becomes zeros, and gets new headers. The rules are what a driver (580, lazy and eager
loading) and ``cuobjdump`` 13 were seen to accept:

- A region without kept code goes as a whole, with its header.
- Unused elements at a region's end are cut off: the region's header states the smaller size.
- Padding between removed code is zeros anyway, and goes with it.
- Elsewhere a run of unused elements becomes one element. Its header has 64 bytes and states a kind
  that doesn't exist, and readers step over it.

Functions go from cubins that stay: a compressed cubin is unpacked, edited and packed again into the
space it had, so no address changes. Space that becomes free at the end of a payload becomes zeros,
and compaction may take whole pages of it out of the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.fatbin import (
    ARCH_OFFSET,
    ELEMENT_HEADER,
    ELEMENT_VERSION,
    KIND_OFFSET,
    OVERWRITTEN_ARCH,
    OVERWRITTEN_KIND,
    REGION_HEADER,
    REGION_SIZE_OFFSET,
)
from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Compression, Element, LibraryMap, Region
from pytest_negativa.models.plan import LibraryPlan, TrimmedCubin
from pytest_negativa.models.reconstruction import RepackedCubin
from pytest_negativa.models.spans import Range, Span
from pytest_negativa.rewriting.cubin_code import CubinCodeError, overwrite_code
from pytest_negativa.rewriting.layout import Change, Edits, Fill, Patch
from pytest_negativa.rewriting.repack import RepackError, repack, repack_frame

_NO_KIND = OVERWRITTEN_KIND.to_bytes(2, "little")
_NO_DEVICE = OVERWRITTEN_ARCH.to_bytes(4, "little")


def overwrite(library_map: LibraryMap, plan: LibraryPlan, fill: int) -> Edits:
    """The edits that overwrite unused elements and frames.

    Args:
        library_map, plan: of the same file.
        fill: the byte, 0 to 255, that the code becomes.

    Raises:
        ReconstructError: the plan does not fit the map, or the map contradicts itself.
    """
    path = plan.library.path
    if library_map.library != plan.library:
        raise ReconstructError(
            f"{path}: its map and its plan are not of the same file; trace it again"
        )
    blocks = {(block.payload.start, block.payload.end): block for block in library_map.iter_code()}
    changes: list[Change] = []
    for start, end in sorted(unused_ranges(plan)):
        if start == end:
            continue
        block = blocks.get((start, end))
        if block is None or block.unreadable is not None:
            why = "is not in its map" if block is None else f"not understood: {block.unreadable}"
            raise ReconstructError(
                f"{path}: its plan gives up [{start:#x}, {end:#x}) ({why}); trace it again"
            )
        changes.append(Fill(start, end, fill))
        if block.region is not None:
            changes.append(Patch(block.header_offset + KIND_OFFSET, _NO_KIND))
            changes.append(Patch(block.header_offset + ARCH_OFFSET, _NO_DEVICE))
    try:
        return Edits.of(plan.library.size, changes)
    except ValueError as e:
        raise ReconstructError(f"{path}: its map contradicts itself: {e}; trace it again") from e


# Regions, frames and their sections are aligned to 64 bytes at most in all known libraries.
_LONGEST_PADDING = 256


def plan_removal(source: ByteSource, library_map: LibraryMap, plan: LibraryPlan) -> Edits:
    """The edits that remove unused code: fills of zeros, which may leave the file, and new headers.

    Args:
        source: the library; only padding is read.
        library_map: of the library.
        plan: decisions on elements and frames; a missing decision means kept.

    Raises:
        ValueError: the map contradicts itself.
    """
    gone = unused_ranges(plan)
    changes = [
        change
        for region in library_map.iter_regions()
        for change in _region_changes(region, [e.payload in gone for e in region.elements])
    ]
    zeros = [(change.start, change.end) for change in changes if isinstance(change, Fill)]
    zeros += gone.intersection(frame.span for frame in library_map.iter_frames())
    filled = [Fill(start, end, 0) for start, end in _joined(source, zeros)]
    patches = (change for change in changes if isinstance(change, Patch))
    return Edits.of(source.size, (*filled, *patches))


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
    unused = unused_ranges(plan)
    found: list[Range] = []
    for region in library_map.iter_regions():
        spans = [e.payload for e in region.elements]
        if spans and unused.issuperset(spans):
            found.append(region.span)
        else:
            found += unused.intersection(spans)
    found += unused.intersection(frame.span for frame in library_map.iter_frames())
    return _joined(source, found)


def unused_ranges(plan: LibraryPlan) -> set[Range]:
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


def _region_changes(region: Region, unused: Sequence[bool]) -> Iterator[Change]:
    """Fills of zeros, and new headers."""
    start, end = region.span
    if unused and all(unused):
        yield Fill(start, end, 0)
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
            yield Fill(run_start, run_end, 0)
        else:
            # An element of an unknown kind.
            own = ELEMENT_HEADER.size
            fields = OVERWRITTEN_KIND, ELEMENT_VERSION, own, run_end - run_start - own
            yield Patch(run_start, ELEMENT_HEADER.pack(*fields, *[0] * 10))
            yield Fill(run_start + own, run_end, 0)


# Of compressed_size in the header of an element, see gpucode.fatbin.
_COMPRESSED_SIZE_OFFSET = 0x10


def trim_kernels(
    source: ByteSource, library_map: LibraryMap, plan: LibraryPlan, value: int
) -> tuple[Edits, tuple[RepackedCubin, ...]]:
    """Overwrite the unused code of every cubin in ``plan.trimmed``.

    A cubin that can't be edited safely is left alone, and the result says so. A claim about a copy
    must rest on the result, not on the plan.

    Args:
        source: the original library, which the map and the plan are of.
        value: the byte that the code becomes.

    Returns:
        The edits of the library, and what they do to each cubin, by offset.

    Raises:
        FormatError: the library can't be read.
    """
    blocks = {block.payload.start: block for block in library_map.iter_code()}
    changes: list[Change] = []
    cubins: list[RepackedCubin] = []
    for trimmed in sorted(plan.trimmed, key=lambda trimmed: trimmed.start):
        if trimmed.start not in blocks:
            problem = f"its plan trims a cubin at {trimmed.start:#x}, where its map has none"
            raise ReconstructError(f"{source.path}: {problem}")
        made, cubin = _trim(source, blocks[trimmed.start], trimmed, value)
        changes += made
        cubins.append(cubin)
    return Edits.of(source.size, changes), tuple(cubins)


def _trim(
    source: ByteSource, block: Element, trimmed: TrimmedCubin, value: int
) -> tuple[list[Change], RepackedCubin]:
    """One cubin, from its stored bytes to edits of the library."""
    stored = source.read(block.payload.start, block.stored_size)
    cubin = RepackedCubin(
        start=block.payload.start, filled=(), stored_before=len(stored), stored_after=len(stored)
    )
    try:
        content = unpack(stored, block.compression, block.unpacked_size)
        edits = overwrite_code(content, trimmed.unused, value)
        if not edits.fills:
            raise CubinCodeError("all its code is referred to by what stays")
        if block.compression is Compression.NONE:
            size = len(stored)
            changes = [
                c.moved(c.start, c.end, block.payload.start + c.start) for c in edits.changes
            ]
        else:
            changes, size = _repack(block, content, edits, stored)
    except (PayloadError, CubinCodeError, RepackError) as e:
        return [], replace(cubin, left_alone=str(e))
    filled = tuple(Span(fill.start, fill.end) for fill in edits.fills)
    return changes, replace(cubin, filled=filled, stored_after=size)


def _repack(
    block: Element, content: bytes, edits: Edits, stored: bytes
) -> tuple[list[Change], int]:
    """Pack an edited cubin into its space; also returns the bytes in use there."""
    edited = bytes(edits.applied_to(content, 0))
    if block.region is None:
        frame, zeros = repack_frame(edited, stored)
        return [Patch(block.payload.start, frame)], len(frame) - zeros
    packed = repack(edited, stored, block.compression, block.payload.size)
    return [
        Patch(block.header_offset + _COMPRESSED_SIZE_OFFSET, len(packed).to_bytes(4, "little")),
        Patch(block.payload.start, packed + bytes(block.payload.size - len(packed))),
    ], len(packed)
