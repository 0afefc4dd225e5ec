"""Tables of an original, row by row, and which layouts of files compaction refuses.

What compaction can't handle is refused here, before anything is planned. The program that
certifies the result (``certify.c``) reads the same tables on its own.

Sources: System V gABI, chapter 5 (dynamic section, ``DT_RELR``); glibc's ``elf/elf.h``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode import elf
from pytest_negativa.gpucode.elf import MARKER, ElfTables
from pytest_negativa.gpucode.elf_tables import (
    DF_1_PIE,
    DT_FLAGS_1,
    DT_JMPREL,
    DT_NULL,
    DT_PLTRELSZ,
    DT_RELA,
    DT_RELASZ,
    DT_RELR,
    DT_RELRSZ,
    DYN,
    EM_X86_64,
    ET_DYN,
    PHDR,
    PT_DYNAMIC,
    PT_GNU_EH_FRAME,
    PT_GNU_PROPERTY,
    PT_GNU_RELRO,
    PT_GNU_SFRAME,
    PT_GNU_STACK,
    PT_INTERP,
    PT_LOAD,
    PT_NOTE,
    PT_NULL,
    PT_PHDR,
    PT_TLS,
    RELA,
    SHDR,
    SHN_LORESERVE,
    DynamicEntry,
)
from pytest_negativa.gpucode.slimmed import AddressSpace
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import PAGE_SIZE, Range
from pytest_negativa.rewriting.compact.records import CannotCompactError

# Known segments: only their p_offset depends on the place of their bytes in the file.
_KNOWN_SEGMENTS = {
    PT_NULL, PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_PHDR, PT_TLS, PT_GNU_EH_FRAME, PT_GNU_STACK,
    PT_GNU_RELRO, PT_GNU_PROPERTY, PT_GNU_SFRAME,
}  # fmt: skip
# Leaves room for sections that compaction adds: the marker, names, and pieces of sections with
# holes, at most one for each program header and section.
_MAX_SECTIONS = (SHN_LORESERVE - 8192) // 2

# Of a process, on all 64-bit machines.
_MAX_ADDRESS = 1 << 63
_SMALLEST_PAGE = 4096
# Bytes that are read in one go.
_STEP = 256 << 10


def page_size(tables: ElfTables) -> int:
    """The largest page, in bytes, of a kernel that can load the library.

    Linux: x86 has 4 KiB pages only; arm64 can be built for 64 KiB, and binutils' default
    max-page-size for it is that. For others, it is the largest that is common.

    From glibc 2.35 on, offset and address of each PT_LOAD must be congruent modulo a page, and
    p_align doesn't count. See ``_dl_map_object_from_fd`` in glibc's elf/dl-load.c.
    """
    page = PAGE_SIZE if tables.header.e_machine == EM_X86_64 else 64 << 10
    while any((s.p_vaddr - s.p_offset) % page for s in tables.loads):
        page //= 2
    return page


def read_tables(source: ByteSource) -> ElfTables:
    """Read and check the tables.

    Raises:
        CannotCompactError: the file is not a shared library of a 64-bit little-endian host, or has
            a layout that compaction doesn't know.
        FormatError: a table leaves the file.
    """
    try:
        tables = elf.read_tables(source)
        space = AddressSpace(source, tables.segments)
    except FormatError as e:
        raise CannotCompactError(source.path, e.problem) from e
    for problem in _problems(tables, space):
        raise CannotCompactError(source.path, problem)
    return tables


def read_at(
    source: ByteSource, tables: ElfTables, vaddr: int, size: int, *, partly: bool = False
) -> bytes:
    """The bytes at an address, as they are in the file.

    Args:
        source, tables: the library.
        vaddr: the address.
        size: number of bytes.
        partly: return fewer bytes if the segment ends before.

    Raises:
        CannotCompactError: the bytes are in no PT_LOAD.
    """
    for load in tables.loads:
        left = load.p_vaddr + load.p_filesz - vaddr
        if load.p_vaddr <= vaddr and left > 0 and (partly or size <= left):
            return source.read(load.p_offset + vaddr - load.p_vaddr, min(size, left))
    raise CannotCompactError(
        source.path, f"a table of {size:#x} bytes at address {vaddr:#x} is in no PT_LOAD"
    )


def refuse_appended_data(source: ByteSource, tables: ElfTables) -> None:
    """Refuse a library with bytes behind all that its tables name; zeros are padding.

    An appended archive is found from the end of the file, and a signature covers the whole file.
    Neither survives a file that gets smaller.

    Raises:
        CannotCompactError: the file has such bytes.
        FormatError: they can't be read.
    """
    header = tables.header
    end = max(
        header.e_phoff + PHDR.size * len(tables.segments),
        header.e_shoff + SHDR.size * len(tables.sections),
        *(load.file_end for load in tables.loads if load.p_filesz),
        *(section.file_end for section in tables.sections if section.in_file),
    )
    for position in range(end, source.size, _STEP):
        if source.read(position, min(_STEP, source.size - position)).strip(b"\0"):
            raise CannotCompactError(
                source.path,
                f"{source.size - end:,} bytes from offset {end:#x} are in no section or segment "
                "and end the file; they may be an appended archive or a signature, which a smaller "
                "file would break",
            )


def _problems(tables: ElfTables, space: AddressSpace) -> Iterator[str]:
    header = tables.header
    if header.e_type != ET_DYN:
        yield f"ELF type {header.e_type}, expected {ET_DYN} (a shared library)"
    if header.e_phentsize != PHDR.size:
        yield f"e_phentsize {header.e_phentsize}, expected {PHDR.size}"
    if header.e_shnum > _MAX_SECTIONS:
        yield f"e_shnum {header.e_shnum}, expected {_MAX_SECTIONS} sections at most"
    for segment in tables.segments:
        if segment.p_type == PT_INTERP:
            yield "is a program (it has PT_INTERP); only libraries are compacted"
        if segment.p_type not in _KNOWN_SEGMENTS:
            yield f"segment of unknown type {segment.p_type:#x}"
    loads = tables.loads
    if not loads or not any(s.p_type == PT_DYNAMIC for s in tables.segments):
        yield "no PT_LOAD or no PT_DYNAMIC: nothing that a dynamic loader could load"
    for load in loads:
        where = f"PT_LOAD at {load.p_vaddr:#x}"
        if load.p_vaddr + load.p_memsz > _MAX_ADDRESS or load.p_paddr > _MAX_ADDRESS:
            yield f"{where}: leaves the address space"
        if load.p_align % _SMALLEST_PAGE or load.p_align & (load.p_align - 1) or not load.p_align:
            yield f"{where}: p_align {load.p_align:#x} is no page size"
        elif (load.p_vaddr - load.p_offset) % _SMALLEST_PAGE:
            # glibc asks for congruence modulo p_align up to 2.34, modulo the page from then on.
            yield f"{where}: p_offset {load.p_offset:#x} is not congruent to p_vaddr"
    for segment in tables.segments:
        if segment.p_type in (PT_LOAD, PT_NULL) or not segment.p_filesz:
            continue
        # Of these, pages may be in a spare; the first byte tells the place.
        there = 1 if segment.p_type in (PT_GNU_RELRO, PT_GNU_EH_FRAME) else segment.p_filesz
        if not space.maps(segment.p_offset, segment.p_vaddr, there):
            yield f"segment of type {segment.p_type:#x} at {segment.p_vaddr:#x} is in no PT_LOAD"
    for section, name in zip(tables.sections, tables.names, strict=True):
        shown = name.decode(errors="replace")
        if section.in_file and section.file_end > space.source.size:
            yield f"section {shown} leaves the file"
        if section.loaded and not space.maps(section.sh_offset, section.sh_addr, section.sh_size):
            yield f"section {shown} is in no PT_LOAD"
        if section.sh_link >= len(tables.sections):
            yield f"section {shown}: sh_link {section.sh_link}"


# Bytes that a relocation of a library writes at most: a TLS descriptor is two words.
_WRITTEN = 16


def read_original(source: ByteSource) -> ElfTables:
    """The tables of a library that is whole, and no program.

    A program without PT_INTERP (static PIE) differs from a library by a flag only. A kernel before
    Linux 5.18 finds its headers by load address plus ``e_phoff``.

    Raises:
        CannotCompactError: see ``read_tables`` and ``refuse_appended_data``; or the file is a
            program, or has lost bytes before.
        FormatError: see ``read_tables``.
    """
    tables = read_tables(source)
    if MARKER in tables.names:
        raise CannotCompactError(source.path, "was compacted or cut before; take the original")
    if read_dynamic(source, tables).get(DT_FLAGS_1, 0) & DF_1_PIE:
        raise CannotCompactError(
            source.path, "is a program (DF_1_PIE); only libraries are compacted"
        )
    refuse_appended_data(source, tables)
    return tables


def read_dynamic(source: ByteSource, tables: ElfTables) -> dict[int, int]:
    """The dynamic section: tag to value; of several, the last counts, as for ld.so."""
    return {row.d_tag: row.d_val for row in dynamic_rows(source, tables)}


def dynamic_rows(source: ByteSource, tables: ElfTables) -> Iterator[DynamicEntry]:
    """The rows of the dynamic section, without the last."""
    for segment in tables.segments:
        if segment.p_type == PT_DYNAMIC:
            size = segment.p_filesz - segment.p_filesz % DYN.size
            rows = DYN.iter_unpack(source.read(segment.p_offset, size))
            yield from itertools.takewhile(lambda row: row.d_tag != DT_NULL, rows)


def relocated_words(source: ByteSource, tables: ElfTables) -> Iterator[Range]:
    """The addresses that ld.so writes to, as ranges that may overlap."""
    dynamic = read_dynamic(source, tables)
    for tag, size_tag in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ), (DT_RELR, DT_RELRSZ)):
        if tag in dynamic:
            size = dynamic.get(size_tag, 0)
            entry = 8 if tag == DT_RELR else RELA.size
            data = read_at(source, tables, dynamic[tag], size - size % entry)
            rows = _packed(data) if tag == DT_RELR else (row[0] for row in RELA.iter_unpack(data))
            yield from ((start, start + _WRITTEN) for start in rows)


def _packed(data: bytes) -> Iterator[int]:
    # An even entry is an address; an odd one a bitmap of the 63 words after the last.
    where = 0
    for (entry,) in struct.iter_unpack("<Q", data):
        if entry & 1 == 0:
            yield entry
            where = entry + 8
            continue
        for bit in range(63):
            if entry >> (bit + 1) & 1:
                yield where + 8 * bit
        where += 63 * 8
