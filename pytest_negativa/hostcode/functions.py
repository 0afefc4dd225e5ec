"""Functions of a library by its unwind tables, which stripped files have, too."""

from __future__ import annotations

import array
import bisect
import struct
import sys
from collections.abc import Sequence

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf
from pytest_negativa.gpucode.source import ByteSource

# Encodings of .eh_frame_hdr, see the Linux Standard Base 5.0, 10.6.2: version, encoding of the
# pointer, of the count, of the table. Linkers write no other.
_VERSION = 1
_PCREL_SDATA4, _UDATA4, _DATAREL_SDATA4 = 0x1B, 0x03, 0x3B
_HEAD = struct.Struct("<4B")
_PAIR = 8


def function_starts(source: ByteSource, elf: HostElf) -> tuple[int, ...] | None:
    """Addresses of functions, sorted; None if the table of ``.eh_frame_hdr`` can't be read.

    Raises:
        FormatError: the section leaves the file.
    """
    section = next((s for s in elf.sections if s.name == ".eh_frame_hdr"), None)
    if section is None or section.size < 12:
        return None
    data = source.read(section.offset, section.size)
    version, pointer, count_encoding, table = _HEAD.unpack_from(data)
    if (version, pointer, count_encoding, table) != (
        _VERSION,
        _PCREL_SDATA4,
        _UDATA4,
        _DATAREL_SDATA4,
    ):
        return None
    (count,) = struct.unpack_from("<I", data, 8)
    if 12 + count * _PAIR > len(data):
        raise FormatError(
            source.path,
            section.offset,
            f".eh_frame_hdr: {count} entries, more than it has room for",
        )
    pairs = array.array("i")
    pairs.frombytes(data[12 : 12 + count * _PAIR])
    if sys.byteorder == "big":
        pairs.byteswap()
    return tuple(sorted(section.vaddr + start for start in pairs[::2]))


def count_functions(starts: Sequence[int], ranges: Sequence[tuple[int, int]]) -> int:
    """How many functions have code in the ranges of addresses.

    A function ends where the next one begins, at the latest.

    Args:
        starts: sorted.
        ranges: sorted, without overlaps.
    """
    found = 0
    counted = 0  # functions before this one are counted or lie before
    for start, end in ranges:
        first = max(bisect.bisect_right(starts, start) - 1, counted)
        last = bisect.bisect_left(starts, end)
        found += max(last - first, 0)
        counted = max(last, counted)
    return found
