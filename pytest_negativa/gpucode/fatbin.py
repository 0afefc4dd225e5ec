"""Fatbin regions and elements: header fields, kinds, flags, archs; why there is no region.

NVIDIA documents neither header. Source of the layout below: the libraries of the PyTorch 2.11
stack and this project's fixtures, compared with the listings of ``cuobjdump``.

Region header, 16 bytes, little endian::

    u32 magic 0xBA55ED50   u16 version 1   u16 header size 16   u64 size of what follows

Element header, 64 bytes and up; elements follow each other and fill the region::

    0x00  u16 kind               1 PTX, 2 cubin, 8 LTO-IR, 128 Tile IR (nvFatbin 13.5)
    0x02  u16 version            0x0101
    0x04  u32 header_size        payload starts here
    0x08  u64 size               of the payload with padding
    0x10  u32 compressed_size    bytes of the payload in use; 0 if not compressed
    0x14  u32 options_offset     0: none; else (u32 offset, u32 length) of options lie there
    0x18  u16 minor, u16 major   of the format inside (PTX ISA version, cubin 1.8)
    0x1C  u32 arch               90 is sm_90; 0 in Tile IR
    0x20  u32 name_offset, u32 name_length
    0x28  u64 flags              see the constants; no other flag is known
    0x30  u64 seed               of scrambled LTO-IR, else 0
    0x38  u64 uncompressed_size  0 if not compressed
"""

from __future__ import annotations

import functools
import struct

from pytest_negativa.arch import ElementKind, SmArch
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import Readable
from pytest_negativa.models.library import Compression, Element, Region
from pytest_negativa.models.spans import Span

_MAGIC_NUMBER = 0xBA55ED50
MAGIC = _MAGIC_NUMBER.to_bytes(4, "little")


# Magic, version, header size, and size of the elements.
REGION_HEADER = struct.Struct("<IHHQ")
ELEMENT_HEADER = struct.Struct("<HHIQIIHHIIIQQQ")
"""The fields from ``kind`` to ``uncompressed_size``, see the module."""

REGION_SIZE_OFFSET = 0x08
"""Of the field ``size`` in a region header."""

KIND_OFFSET, ARCH_OFFSET = 0x00, 0x1C
"""Of fields in an element header."""

ELEMENT_VERSION = 0x0101
"""Of element headers: the only one seen."""

OVERWRITTEN_KIND = 0
"""The kind of overwritten elements: none of NVIDIA's.

``cuobjdump`` 13.0 unpacks every element of a kind that it knows, and gives up on the library if
that fails. It skips kind 0, but takes 0x40 for PTX.
"""

OVERWRITTEN_ARCH = 999
"""The arch of overwritten elements: sm_999, which no device has.

No device can compile PTX or LTO-IR of this arch, since the arch must not exceed the device's. No
device runs a cubin of major 99; the flags for ``a`` and ``f`` only narrow that. The number is
positive in 16 bits, should a reader store it so.
"""

_REGION_VERSION = 1
# 128 is the largest seen; names and options make it variable.
_MAX_HEADER_SIZE = 1 << 16

_KINDS = {
    1: ElementKind.PTX,
    2: ElementKind.CUBIN,
    8: ElementKind.LTO_IR,
    128: ElementKind.TILE_IR,
}
_FLAG_LZ4 = 0x2000
_FLAG_ZSTD = 0x8000
_FLAG_ARCH_SPECIFIC = 0x100000
_FLAG_FAMILY_SPECIFIC = 0x200000
_KNOWN_FLAGS = (
    0x1  # 64 bit
    | 0x2  # debug
    # Set by every toolkit up to CUDA 10.0, and by today's "fatbinary --cuda": it is no OpenCL.
    | 0x4
    | 0x10  # Linux
    | _FLAG_LZ4
    | _FLAG_ZSTD
    | 0x10000  # scrambled LTO-IR, which nvcc compresses; the header has a seed
    | _FLAG_ARCH_SPECIFIC
    | _FLAG_FAMILY_SPECIFIC
    # Set for sm_100 and later. Its meaning is not known; the driver chooses alike without it.
    | 0x1000000
)


class RegionFault(Exception):
    """There is no sound region at an offset; ``offset`` is that of the faulty field."""

    def __init__(self, offset: int, problem: str) -> None:
        self.offset = offset
        self.problem = problem
        super().__init__(offset, problem)


class WalkBudget:
    """Limits the headers that are read in a section, so that crafted overlapping chains end.

    A sound section needs a step for each region, element, frame, block of a frame and false hit.
    It has far fewer of these than one in 32 bytes.

    Args:
        path: for messages.
        section_size: bytes of the section that lie in the file.
    """

    __slots__ = ("_path", "_steps")

    def __init__(self, path: str, section_size: int) -> None:
        self._path = path
        self._steps = section_size // 32 + 1024

    def spend(self, offset: int, steps: int = 1) -> None:
        """Pay for the header at ``offset``.

        Raises:
            FormatError: the budget is spent.
        """
        self._steps -= steps
        if self._steps < 0:
            raise FormatError(
                self._path, offset, "too many overlapping headers; crafted or damaged"
            )


def parse_region(source: Readable, offset: int, end: int, budget: WalkBudget) -> Region:
    """Read the region whose header is at ``offset``, in a section that ends at ``end``.

    Raises:
        RegionFault: a header or the element chain does not fit its bounds.
        FormatError: the budget is spent.
    """
    budget.spend(offset)
    if offset + REGION_HEADER.size > end:
        raise RegionFault(offset, f"region header leaves its section, which ends at {end:#x}")
    magic, version, header_size, size = REGION_HEADER.unpack(
        source.read(offset, REGION_HEADER.size)
    )
    if magic != _MAGIC_NUMBER:
        raise RegionFault(offset, f"magic {magic:#010x}, expected {_MAGIC_NUMBER:#x}")
    if version != _REGION_VERSION or header_size != REGION_HEADER.size:
        raise RegionFault(
            offset + 4,
            f"region version {version} with a header of {header_size} bytes, "
            f"expected {_REGION_VERSION} and {REGION_HEADER.size}",
        )
    region_end = offset + REGION_HEADER.size + size
    if region_end > end:
        raise RegionFault(
            offset + REGION_SIZE_OFFSET, f"region ends at {region_end:#x}, its section at {end:#x}"
        )
    elements = []
    position = offset + REGION_HEADER.size
    while position < region_end:
        budget.spend(position)
        element = _parse_element(source, position, region_end, offset)
        elements.append(element)
        position = element.payload.end
    return Region(span=Span(offset, region_end), elements=tuple(elements))


def _parse_element(source: Readable, offset: int, end: int, region: int) -> Element:
    if offset + ELEMENT_HEADER.size > end:
        raise RegionFault(offset, f"element header leaves its region, which ends at {end:#x}")
    # Plain names: libraries have tens of thousands of elements.
    (
        kind_number,
        version,
        header_size,
        size,
        compressed_size,
        _options_offset,
        _minor,
        _major,
        arch_number,
        name_offset,
        name_length,
        flags,
        _seed,
        uncompressed_size,
    ) = ELEMENT_HEADER.unpack(source.read(offset, ELEMENT_HEADER.size))
    if version != ELEMENT_VERSION:
        raise RegionFault(
            offset + 2, f"element header version {version:#x}, expected {ELEMENT_VERSION:#x}"
        )
    if not ELEMENT_HEADER.size <= header_size <= _MAX_HEADER_SIZE:
        raise RegionFault(offset + 4, f"element header of {header_size} bytes, expected 64 or more")
    payload = offset + header_size
    payload_end = payload + size
    if payload_end > end:
        raise RegionFault(
            offset + 8, f"element payload ends at {payload_end:#x}, its region at {end:#x}"
        )
    kind, arch, compression, unreadable = _traits(kind_number, flags, arch_number)
    packed = compression is not Compression.NONE
    if packed and unreadable is None and compressed_size > size:
        unreadable = f"compressed size {compressed_size:#x} exceeds the payload's {size:#x} bytes"
    identifier = None
    if header_size > ELEMENT_HEADER.size and name_length:
        identifier = _header_text(source.read(offset, header_size), name_offset, name_length)
    return Element(
        region=region,
        header_offset=offset,
        payload=Span(payload, payload_end),
        stored_size=compressed_size if packed and not unreadable else size,
        unpacked_size=uncompressed_size if packed else size,
        kind=kind,
        arch=arch,
        compression=compression,
        kind_number=kind_number,
        identifier=identifier,
        unreadable=unreadable,
    )


@functools.lru_cache(maxsize=1024)
def _traits(
    kind_number: int, flags: int, arch: int
) -> tuple[ElementKind, SmArch, Compression, str | None]:
    """Kind, arch, compression and what is unreadable, which these numbers alone decide."""
    kind = _KINDS.get(kind_number, ElementKind.UNKNOWN)
    if flags & ~_KNOWN_FLAGS:
        # Such a flag may change the kind of the content, or the devices that load it: the flag for
        # ``a`` did when it was new. So the driver's choice must not count on the element.
        kind = ElementKind.UNKNOWN
    compression = (
        Compression.LZ4
        if flags & _FLAG_LZ4
        else Compression.ZSTD
        if flags & _FLAG_ZSTD
        else Compression.NONE
    )
    suffix = "a" if flags & _FLAG_ARCH_SPECIFIC else "f" if flags & _FLAG_FAMILY_SPECIFIC else ""
    unreadable = None
    if arch == OVERWRITTEN_ARCH:
        unreadable = f"overwritten: it is marked for sm_{OVERWRITTEN_ARCH}, which no device has"
    elif unknown_flags := flags & ~_KNOWN_FLAGS:
        unreadable = f"flags {unknown_flags:#x} are not known"
    elif kind is ElementKind.UNKNOWN:
        unreadable = f"element kind {kind_number} is not known"
    elif flags & _FLAG_LZ4 and flags & _FLAG_ZSTD:
        unreadable = f"flags {flags:#x} state both LZ4 and zstd"
    return kind, SmArch.from_number(arch, suffix), compression, unreadable


def is_removed(element: Element) -> bool:
    """Whether the element only fills the place of code that was overwritten or taken out."""
    arch = SmArch.from_number(OVERWRITTEN_ARCH, element.arch.suffix)
    return element.kind_number == OVERWRITTEN_KIND or element.arch == arch


def _header_text(header: bytes, offset: int, length: int) -> str | None:
    text = header[offset : offset + length].rstrip(b"\0 ")
    return text.decode("utf-8", "backslashreplace") or None
