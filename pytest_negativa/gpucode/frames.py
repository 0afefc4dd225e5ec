"""Cubins without a fatbin: in zstd frames, and plain ones.

cublasLt keeps the former in ``.ldata``, CUPTI the latter in ``.rodata``.

This module walks the frame and block headers to find the end of a frame (RFC 8878, 3.1.1). The
package zstandard decompresses.
"""

from __future__ import annotations

import zstandard

from pytest_negativa.gpucode.cubin import abi_problem, cubin_arch, is_cubin_header
from pytest_negativa.gpucode.elf_tables import EHDR, SHDR, SHT_NOBITS
from pytest_negativa.gpucode.fatbin import WalkBudget
from pytest_negativa.gpucode.payload import MAX_UNPACKED_SIZE
from pytest_negativa.gpucode.source import Readable
from pytest_negativa.models.library import Compression, Element
from pytest_negativa.models.spans import Span

MAGIC = (0xFD2FB528).to_bytes(4, "little")
PLAIN_MAGIC = b"\x7fELF\x02\x01\x01"
"""Of 64-bit little-endian ELF files, and so of cubins."""

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
