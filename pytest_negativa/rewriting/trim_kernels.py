"""Makes the edits that overwrite unused functions inside cubins that stay.

A compressed cubin is unpacked, edited and packed again into the space it had, so no address
changes. Space that becomes free at the end of a payload becomes zeros, and compaction may take
whole pages of it out of the file.
"""

from __future__ import annotations

import struct

from msgspec.structs import replace

from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Compression, Element, LibraryMap
from pytest_negativa.models.plan import LibraryPlan, TrimmedCubin
from pytest_negativa.models.reconstruction import RepackedCubin
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting.cubin_code import CubinCodeError, overwrite_code
from pytest_negativa.rewriting.edits import Change, Edits, Patch
from pytest_negativa.rewriting.repack import RepackError, repack, repack_frame

# Of compressed_size in the header of an element, see gpucode.fatbin.
_COMPRESSED_SIZE_OFFSET = 0x10
_COMPRESSED_SIZE = struct.Struct("<I")


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
        ValueError: the plan is not of this map.
    """
    blocks = {block.payload.start: block for block in library_map.iter_code()}
    changes: list[Change] = []
    cubins: list[RepackedCubin] = []
    for trimmed in sorted(plan.trimmed, key=lambda trimmed: trimmed.start):
        if trimmed.start not in blocks:
            raise ValueError(f"the plan trims a cubin at {trimmed.start:#x}, which the map lacks")
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
        Patch(block.header_offset + _COMPRESSED_SIZE_OFFSET, _COMPRESSED_SIZE.pack(len(packed))),
        Patch(block.payload.start, packed + bytes(block.payload.size - len(packed))),
    ], len(packed)
