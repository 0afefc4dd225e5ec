"""Containers of GPU code in a section: regions, zstd frames, plain cubins; 1,000 problems.

Frames are cubins without a fatbin: in zstd frames, as cublasLt keeps them in ``.ldata``, and plain
ones, as CUPTI does in ``.rodata``. This module walks the frame and block headers to find the end of
a zstd frame (RFC 8878, 3.1.1). The package zstandard decompresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import zstandard

from pytest_negativa.gpucode import fatbin
from pytest_negativa.gpucode.cubin import abi_problem, cubin_arch, is_cubin_header
from pytest_negativa.gpucode.elf import HostSection
from pytest_negativa.gpucode.elf_tables import EHDR, SHDR, SHT_NOBITS
from pytest_negativa.gpucode.fatbin import RegionFault, WalkBudget
from pytest_negativa.gpucode.payload import MAX_UNPACKED_SIZE
from pytest_negativa.gpucode.search import load_search
from pytest_negativa.gpucode.source import Readable, ReadAhead
from pytest_negativa.models.file_kinds import ELF_MAGIC, FileKind
from pytest_negativa.models.library import LINKED, RELOCATABLE, Compression, Element, Region
from pytest_negativa.models.spans import Span

_FRAME_MAGIC = (0xFD2FB528).to_bytes(4, "little")
# Of 64-bit little-endian ELF files, and so of cubins.
_PLAIN_MAGIC = ELF_MAGIC + b"\x02\x01\x01"

_MAX_FRAME_HEADER = 18
_BLOCK_RLE = 1
_BLOCK_RESERVED = 3
# RFC 8878, 3.1.1.2.4: Block_Maximum_Size is at most 128 KB.
_MAX_BLOCK_SIZE = 128 << 10
_CHECKSUM_SIZE = 4
# Unpacking the front of a frame takes about as long as reading this many headers.
_FRONT_STEPS = 8


def parse_frame(source: Readable, offset: int, end: int, budget: WalkBudget) -> Element | None:
    """Read the frame at ``offset``; None if it holds no cubin, is other data, or has lost its end.

    Raises:
        FormatError: the budget is spent.
    """
    budget.spend(offset)
    head = source.read(offset, min(_MAX_FRAME_HEADER, end - offset))
    try:
        parameters = zstandard.get_frame_parameters(head)
        header_size = zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    unpacked_size = parameters.content_size
    # The size is optional (RFC 8878, 3.1.1.1.4); without it there is no limit for unpacking.
    if not EHDR.size <= unpacked_size <= MAX_UNPACKED_SIZE or parameters.dict_id:
        return None
    position = offset + header_size
    last = False
    while not last:
        # What lies in a hole was removed. Its zeros would be empty blocks.
        stored = source.next_stored(position)
        if position + 3 > end or stored is None or stored[0] > position:
            return None
        budget.spend(position)
        block = int.from_bytes(source.read(position, 3), "little")
        last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == _BLOCK_RESERVED or size > _MAX_BLOCK_SIZE:
            return None
        position += 3 + (1 if kind == _BLOCK_RLE else size)
    frame_end = position + (_CHECKSUM_SIZE if parameters.has_checksum else 0)
    if frame_end > end:
        return None
    budget.spend(offset, _FRONT_STEPS)
    elf_header = _front(source, offset, frame_end)
    if not is_cubin_header(elf_header) or len(elf_header) < EHDR.size:
        return None
    return Element.bare(
        Span(offset, frame_end),
        unpacked_size=unpacked_size,
        arch=cubin_arch(elf_header),
        unreadable=abi_problem(elf_header),
    )


def parse_plain_cubin(
    source: Readable, offset: int, end: int, budget: WalkBudget
) -> Element | None:
    """Read the headers of the ELF file at ``offset``; None if it is no cubin that fits.

    Raises:
        FormatError: the budget is spent.
    """
    budget.spend(offset)
    head = source.read(offset, min(EHDR.size, end - offset))
    if not is_cubin_header(head) or len(head) < EHDR.size:
        return None
    header = EHDR.unpack_from(head)
    table_size = header.e_shnum * SHDR.size
    if header.e_shentsize != SHDR.size or offset + header.e_shoff + table_size > end:
        return None
    budget.spend(offset, header.e_shnum)
    table = source.read(offset + header.e_shoff, table_size)
    size = max(
        header.e_shoff + table_size,
        header.e_phoff + header.e_phentsize * header.e_phnum,
        *(s.file_end for s in SHDR.iter_unpack(table) if s.sh_type != SHT_NOBITS),
        EHDR.size,
    )
    if offset + size > end:
        return None
    return Element.bare(
        Span(offset, offset + size),
        unpacked_size=size,
        arch=cubin_arch(head),
        compression=Compression.NONE,
        unreadable=abi_problem(head),
    )


def _front(source: Readable, offset: int, end: int) -> bytes:
    """Unpack the first bytes of a frame's content, and not the rest."""
    # The first block holds them. Its header has 3 bytes.
    packed = source.read(offset, min(end - offset, _MAX_FRAME_HEADER + 3 + _MAX_BLOCK_SIZE))
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_SIZE)
    try:
        with decompressor.stream_reader(packed) as reader:
            return reader.read(EHDR.size)
    except zstandard.ZstdError:
        return b""


# Sections that hold nothing but regions. Other bytes in them are damage, and reported. In other
# sections they are other data.
FATBIN_SECTIONS = frozenset({LINKED, RELOCATABLE})

# Bytes. Regions mostly follow each other, so the search for the next one starts small. It takes
# ever larger steps through other data. malloc gives larger blocks back to the system each time.
_FIRST_WINDOW = 256
_WINDOW_GROWTH = 16
_MAX_WINDOW = 512 << 10

# Without a limit, every 4 bytes of a crafted section could be a problem of their own.
_MAX_PROBLEMS = 1000

REGION_MAGICS = (fatbin.MAGIC,)
ALL_MAGICS = (fatbin.MAGIC, _FRAME_MAGIC, _PLAIN_MAGIC)
"""Of containers in sections of any kind."""

_FIND_REGION = load_search(REGION_MAGICS)
_FIND_CONTAINER = load_search(ALL_MAGICS)


class Problems(list[str]):
    """Places of a library that are not understood, up to a limit."""

    def add(self, offset: int, text: str) -> None:
        """Note a problem at a file offset, unless the limit is reached."""
        if len(self) < _MAX_PROBLEMS:
            self.append(f"at offset {offset:#x}: {text}")
        elif len(self) == _MAX_PROBLEMS:
            self.append(f"from offset {offset:#x} on: further problems are not listed")


def iter_containers(
    source: Readable, section: HostSection, problems: Problems
) -> Iterator[Region | Element]:
    """Find all regions and bare cubin frames of a section, by offset; they never overlap.

    Data that only looks like a region is skipped. In a section that should hold nothing but
    regions it goes to ``problems``, as do all other bytes that are not understood.

    Raises:
        FormatError: the section can't be read, or its headers overlap without end.
    """
    strict = section.name in FATBIN_SECTIONS or section.content is FileKind.FATBIN
    name = section.name or "fatbin file"
    end = section.offset + section.size
    # Instructions hold no frames. A frame in a fatbin section is a part of a payload.
    with_frames = not (strict or section.executable)
    stored = sum(stop - start for start, stop in _iter_stored(source, section.offset, end))
    source = ReadAhead(source, end)
    search = _Search(source, end, with_frames=with_frames)
    budget = WalkBudget(source.path, stored)
    position = section.offset
    while (hit := search.next(position)) is not None:
        offset, magic = hit
        if strict and (unknown := _first_nonzero(source, position, offset)) is not None:
            problems.add(
                unknown,
                f"{name}: {offset - unknown:,} bytes before the next region are not understood",
            )
        found: Region | Element | None = None
        try:
            if magic == fatbin.MAGIC:
                found = fatbin.parse_region(source, offset, end, budget)
            elif magic == _FRAME_MAGIC:
                found = parse_frame(source, offset, end, budget)
            else:
                found = parse_plain_cubin(source, offset, end, budget)
        except RegionFault as fault:
            if strict:
                problems.add(fault.offset, f"{name}: region at {offset:#x}: {fault.problem}")
        # Among other data, the 16 bytes of an empty region could be anything.
        if isinstance(found, Region) and not found.elements and not strict:
            found = None
        if found is None:
            position = offset + len(magic)
        else:
            yield found
            position = found.span.end
    if strict and (unknown := _first_nonzero(source, position, end)) is not None:
        problems.add(unknown, f"{name}: {end - unknown:,} bytes at its end are not understood")


def may_have_containers(source: Readable, start: int, end: int, names: Iterable[str]) -> bool:
    """Whether sections of these names that lie in ``[start, end)`` are worth their search."""
    if not FATBIN_SECTIONS.isdisjoint(names):
        return True
    return _Search(source, end, with_frames=True).next(start) is not None


def _iter_stored(source: Readable, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of ``[start, end)`` that lie in the file; the rest is zeros."""
    while start < end and (found := source.next_stored(start)) is not None and found[0] < end:
        start = min(found[1], end)
        yield found[0], start


def _first_nonzero(source: Readable, start: int, end: int) -> int | None:
    for position, stored_end in _iter_stored(source, start, end):
        while position < stored_end:
            data = source.read(position, min(stored_end - position, _MAX_WINDOW))
            if stripped := data.lstrip(b"\0"):
                return position + len(data) - len(stripped)
            position += len(data)
    return None


class _Search:
    """Finds the next magic number; reads the file in windows."""

    def __init__(self, source: Readable, end: int, *, with_frames: bool) -> None:
        self._source = source
        self._end = end
        self._magics = ALL_MAGICS if with_frames else REGION_MAGICS
        self._find = _FIND_CONTAINER if with_frames else _FIND_REGION
        self._overlap = max(map(len, self._magics)) - 1
        self._base = 0
        self._data = b""
        self._window = _FIRST_WINDOW

    def next(self, position: int) -> tuple[int, bytes] | None:
        """Offset and magic number of the first occurrence at or after ``position``."""
        # Containers mostly follow each other, with zeros between them.
        front = self._source.read(position, max(0, min(_FIRST_WINDOW, self._end - position)))
        head = front.lstrip(b"\0")
        for magic in self._magics:
            if head.startswith(magic):
                return position + len(front) - len(head), magic
        while (stored := self._source.next_stored(position)) is not None:
            # Bytes that the file doesn't hold are zeros, and no magic number has a zero.
            position = stored[0]
            if position + self._overlap >= self._end:
                break
            if not self._base <= position < self._base + len(self._data) - self._overlap:
                self._load(position)
            at = self._find(self._data, len(self._data), position - self._base)
            if at >= 0:
                return self._base + at, next(
                    magic for magic in self._magics if self._data.startswith(magic, at)
                )
            position = self._base + len(self._data) - self._overlap
            self._window = min(self._window * _WINDOW_GROWTH, _MAX_WINDOW)
        return None

    def _load(self, position: int) -> None:
        if position != self._base + len(self._data) - self._overlap:
            self._window = _FIRST_WINDOW
        self._base = position
        self._data = self._source.read(position, min(self._window, self._end - position))
