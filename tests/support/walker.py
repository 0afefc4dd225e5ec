"""A second reader of regions and frames, written for these tests with ``struct`` alone.

It shares no code with the package and takes another way: it knows in which sections of which
library the GPU code lies, walks sizes there, and finds frames by unpacking them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

REGION_MAGIC = b"\x50\xed\x55\xba"
FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
KINDS = {1: "ptx", 2: "cubin", 8: "lto-ir"}


@dataclass
class Walked:
    """Totals of one section.

    ``elements`` counts by arch and kind, ``stored`` and ``unpacked`` add up bytes in the same
    way; ``accounted`` is all bytes of regions, headers included.
    """

    size: int = 0
    regions: int = 0
    accounted: int = 0
    elements: Counter[tuple[str, str]] = field(default_factory=Counter)
    stored: Counter[tuple[str, str]] = field(default_factory=Counter)
    unpacked: Counter[tuple[str, str]] = field(default_factory=Counter)
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)


def sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every section of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _type, _flags, _address, offset, size in headers:
        start = names + name
        yield data[start : data.index(b"\0", start)].decode(), offset, size


def walk(path: Path, wanted: dict[str, str]) -> dict[str, Walked]:
    """``wanted`` maps a section to what it holds: ``regions``, ``mixed`` or ``frames``."""
    data = path.read_bytes()
    result = {}
    for name, offset, size in sections(data):
        if name in wanted:
            walked = result[name] = Walked(size=size)
            if wanted[name] == "regions":
                _walk_regions(data, offset, offset + size, walked)
            elif wanted[name] == "mixed":
                _search_regions(data, offset, offset + size, walked)
            else:
                _search_frames(data, offset, offset + size, walked)
    assert set(result) == set(wanted)
    return result


def _walk_regions(data: bytes, position: int, end: int, walked: Walked) -> None:
    """Regions that follow each other, with nothing but zeros between them."""
    while position < end:
        if data[position] == 0:
            position += 1
            continue
        assert data[position : position + 4] == REGION_MAGIC, hex(position)
        position = _walk_region(data, position, walked)


def _search_regions(data: bytes, position: int, end: int, walked: Walked) -> None:
    """Regions among other data, at addresses divisible by 8."""
    while (position := data.find(REGION_MAGIC, position, end)) >= 0:
        version, header_size, size = struct.unpack_from("<HHQ", data, position + 4)
        sound = version == 1 and header_size == 16 and position + 16 + size <= end
        position = _walk_region(data, position, walked) if sound else position + 4


def _walk_region(data: bytes, start: int, walked: Walked) -> int:
    header_size, size = struct.unpack_from("<HQ", data, start + 6)
    position, end = start + header_size, start + header_size + size
    walked.regions += 1
    walked.accounted += end - start
    while position < end:
        kind, version, element_header_size, payload_size = struct.unpack_from(
            "<HHIQ", data, position
        )
        assert version == 0x101
        (number,) = struct.unpack_from("<I", data, position + 0x1C)
        (flags,) = struct.unpack_from("<Q", data, position + 0x28)
        (unpacked_size,) = struct.unpack_from("<Q", data, position + 0x38)
        suffix = "a" if flags & 0x100000 else "f" if flags & 0x200000 else ""
        key = f"sm_{number}{suffix}", KINDS[kind]
        walked.elements[key] += 1
        walked.stored[key] += payload_size
        walked.unpacked[key] += unpacked_size if flags & 0xA000 else payload_size
        position += element_header_size + payload_size
    assert position == end
    return int(end)


def _search_frames(data: bytes, position: int, end: int, walked: Walked) -> None:
    """Frames by unpacking: zstd says how many bytes of the input were left over."""
    while (position := data.find(FRAME_MAGIC, position, end)) >= 0:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        try:
            content = unpacker.decompress(data[position : min(end, position + (8 << 20))])
        except zstandard.ZstdError:
            position += 4
            continue
        if not unpacker.eof or content[:4] != b"\x7fELF" or content[18:20] != b"\xbe\0":
            position += 4
            continue
        size = min(end, position + (8 << 20)) - position - len(unpacker.unused_data)
        walked.frames[position] = size, len(content)
        position += size
