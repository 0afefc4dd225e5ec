"""A third reader of GPU code, which knows nothing of a file: it searches all sections with bytes.

It shares no code with the package, and unpacks each element to read the names of its kernels.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lz4.block
import zstandard

REGION_MAGIC = b"\x50\xed\x55\xba"
FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
KINDS = {1: "ptx", 2: "cubin", 8: "lto-ir"}

_NOBITS = 8
_SYMBOLS = 2
_FUNCTION = 2
_ENTRY = 0x10  # STO_CUDA_ENTRY, in st_other
_PIECE = 64 << 10
_LARGEST_CUBIN = 512 << 20
_PTX_ENTRY = re.compile(rb"\.entry\s+([\w$]+)")


@dataclass
class Scanned:
    """What one file holds: elements by arch and kind, bare frames, names of kernels."""

    regions: int = 0
    frames: int = 0
    elements: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)


def scan(path: Path) -> Scanned:
    found = Scanned()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, end in _sections(data):
            gaps = []
            position = start
            for region_start, region_end in _regions(data, start, end):
                gaps.append((position, region_start))
                _read_region(data, region_start, region_end, found)
                position = region_end
            for gap_start, gap_end in [*gaps, (position, end)]:
                for content in _frames(data, gap_start, gap_end):
                    found.frames += 1
                    found.kernels |= _cubin_kernels(content)
                for content in _plain_cubins(data, gap_start, gap_end):
                    found.elements[_arch(content), "cubin"] += 1
                    found.kernels |= _cubin_kernels(content)
    return found


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    for number in range(count):
        header = struct.unpack_from("<IIQQQQ", data, table + number * entry_size)
        if header[1] not in (0, _NOBITS) and header[5]:
            yield header[4], header[4] + header[5]


def _regions(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Whatever begins like a region and is a chain of elements up to its end."""
    position = start
    while (position := data.find(REGION_MAGIC, position, end)) >= 0:
        stop = _end_of_region(data, position, end)
        if stop is None:
            position += 4
        else:
            yield position, stop
            position = stop


def _end_of_region(data: mmap.mmap, position: int, end: int) -> int | None:
    if position + 16 > end:
        return None
    version, header_size, size = struct.unpack_from("<HHQ", data, position + 4)
    stop = position + 16 + size
    if (version, header_size) != (1, 16) or stop > end:
        return None
    at = position + 16
    while at + 64 <= stop:
        _kind, version, header_size, size = struct.unpack_from("<HHIQ", data, at)
        if version != 0x101 or header_size < 64:
            return None
        at += header_size + size
    return int(stop) if at == stop else None


def _read_region(data: mmap.mmap, start: int, end: int, found: Scanned) -> None:
    found.regions += 1
    at = start + 16
    while at < end:
        kind, _version, header_size, size, packed_size = struct.unpack_from("<HHIQI", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        (unpacked_size,) = struct.unpack_from("<Q", data, at + 56)
        suffix = "a" if flags & 0x100000 else "f" if flags & 0x200000 else ""
        found.elements[f"sm_{arch}{suffix}", KINDS[kind]] += 1
        # LTO-IR of cuFFT is packed in a way of its own, and lists no names.
        if KINDS[kind] != "lto-ir":
            stored = data[at + header_size : at + header_size + size]
            content = _unpack(stored, packed_size, unpacked_size, flags)
            found.kernels |= _kernels(content, KINDS[kind])
        at += header_size + size


def _unpack(stored: bytes, packed_size: int, unpacked_size: int, flags: int) -> bytes:
    packed = stored[:packed_size]
    if flags & 0x8000:
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=unpacked_size)
    if flags & 0x2000:
        return bytes(lz4.block.decompress(packed, uncompressed_size=unpacked_size))
    return stored


def _kernels(content: bytes, kind: str) -> set[str]:
    if kind == "ptx":
        return {name.decode() for name in _PTX_ENTRY.findall(content)}
    return _cubin_kernels(content)


def _frames(data: mmap.mmap, start: int, end: int) -> Iterator[bytes]:
    """What zstd frames with an ELF file of a device hold, by unpacking whatever may be one."""
    position = start
    while (position := data.find(FRAME_MAGIC, position, end)) >= 0:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        content, at = b"", position
        try:
            while at < end and not unpacker.eof and len(content) < _LARGEST_CUBIN:
                content += unpacker.decompress(data[at : min(end, at + _PIECE)])
                at = min(end, at + _PIECE)
                if content[:4] != b"\x7fELF"[: len(content)]:
                    break
        except zstandard.ZstdError:
            content = b""
        if unpacker.eof and content[:4] == b"\x7fELF" and content[18:20] == b"\xbe\0":
            yield content
            position = at - len(unpacker.unused_data)
        else:
            position += 4


def _plain_cubins(data: mmap.mmap, start: int, end: int) -> Iterator[bytes]:
    """ELF files of a device that lie in a section as they are, up to its end."""
    position = start
    while (position := data.find(b"\x7fELF\x02\x01\x01", position, end)) >= 0:
        if data[position + 18 : position + 20] == b"\xbe\0":
            yield data[position:end]
        position += 7


def _arch(cubin: bytes) -> str:
    """From ABI version 8 on the second byte of e_flags, before the first; with the suffix ``a``."""
    if cubin[8] >= 8:
        return f"sm_{cubin[0x31]}{'a' if cubin[0x30] & 8 else ''}"
    return f"sm_{cubin[0x30]}{'a' if cubin[0x31] & 8 else ''}"


def _cubin_kernels(cubin: bytes) -> set[str]:
    """Functions of the symbol table that are defined there and marked as entries."""
    names = set()
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count = struct.unpack_from("<HH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQI", cubin, table + number * entry_size)
        for number in range(count)
    ]
    for header in headers:
        if header[1] != _SYMBOLS:
            continue
        strings = headers[header[6]][4]
        for name, info, other, section in struct.iter_unpack(
            "<IBBH16x", cubin[header[4] : header[4] + header[5]]
        ):
            if info & 15 == _FUNCTION and other & _ENTRY and section:
                names.add(cubin[strings + name : cubin.index(b"\0", strings + name)].decode())
    return names
