"""The tables of a 64-bit little-endian shared library, as they stand in the file, and back.

Here they are read for writing: exact rows, in order, with nothing interpreted. What compaction
can't handle is refused here, before anything is planned. The check of the result
(``compact_check``) reads the same tables with pyelftools instead.

Layouts: System V gABI, chapters 4 (ELF header, section headers) and 5 (program headers).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.records import CannotCompactError

EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
PHDR = struct.Struct("<IIQQQQQQ")
SHDR = struct.Struct("<IIQQQQIIQQ")
DYN = struct.Struct("<qQ")

ET_DYN = 3
EM_X86_64, EM_AARCH64 = 62, 183

PT_NULL, PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_PHDR, PT_TLS = 0, 1, 2, 3, 4, 6, 7
PT_GNU_EH_FRAME, PT_GNU_STACK, PT_GNU_RELRO = 0x6474E550, 0x6474E551, 0x6474E552
PT_GNU_PROPERTY, PT_GNU_SFRAME = 0x6474E553, 0x6474E554
# Those of which it is known that nothing but p_offset depends on where bytes lie in the file.
_KNOWN_SEGMENTS = {
    PT_NULL, PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_PHDR, PT_TLS, PT_GNU_EH_FRAME, PT_GNU_STACK,
    PT_GNU_RELRO, PT_GNU_PROPERTY, PT_GNU_SFRAME,
}  # fmt: skip
PF_X, PF_W = 1, 2

SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_NOBITS, SHT_DYNSYM = 0, 1, 2, 8, 11
SHF_ALLOC, SHF_EXECINSTR, SHF_TLS = 2, 4, 0x400
SHN_LORESERVE = 0xFF00
# Sections that compaction may add: pieces of those with holes, at most one for each program header,
# the marker, names.
_SPARE_SECTIONS = 8192
MAX_HEADERS = 8000

# Of the names of at most 0xff00 sections; a crafted file may point at all of itself.
_MAX_NAMES_SIZE = 256 << 20
# Of a process, on every 64-bit machine.
_MAX_ADDRESS = 1 << 63
_SMALLEST_PAGE = 4096
# Linux: x86 has 4 KiB pages only; arm64 can be built for 64 KiB, and binutils' default
# max-page-size for it is that. Others: the largest that is common.
_PAGE_SIZES = {EM_X86_64: 4096, EM_AARCH64: 65536}
_OTHER_PAGE_SIZE = 65536


class ProgramHeader(NamedTuple):
    """In the order of the file; the names are the gABI's."""

    p_type: int
    p_flags: int
    p_offset: int
    p_vaddr: int
    p_paddr: int
    p_filesz: int
    p_memsz: int
    p_align: int

    @property
    def file_end(self) -> int:
        return self.p_offset + self.p_filesz


class SectionHeader(NamedTuple):
    """In the order of the file; the names are the gABI's."""

    sh_name: int
    sh_type: int
    sh_flags: int
    sh_addr: int
    sh_offset: int
    sh_size: int
    sh_link: int
    sh_info: int
    sh_addralign: int
    sh_entsize: int

    @property
    def loaded(self) -> bool:
        """Whether its bytes lie in the file and get into memory."""
        return bool(self.sh_flags & SHF_ALLOC) and self.in_file

    @property
    def in_file(self) -> bool:
        return self.sh_type not in (SHT_NULL, SHT_NOBITS)

    @property
    def file_end(self) -> int:
        return self.sh_offset + self.sh_size


@dataclass(frozen=True, slots=True)
class ElfTables:
    """The tables of one library.

    Attributes:
        header: the 64 bytes of the ELF header.
        segments: the program headers.
        sections: the section headers; empty if the file has none.
        names: a name for each section.
        names_index: ``e_shstrndx``.
        machine: ``e_machine``.
    """

    header: bytes
    segments: tuple[ProgramHeader, ...]
    sections: tuple[SectionHeader, ...]
    names: tuple[bytes, ...]
    names_index: int
    machine: int

    @property
    def loads(self) -> tuple[ProgramHeader, ...]:
        return tuple(s for s in self.segments if s.p_type == PT_LOAD)

    @property
    def page_size(self) -> int:
        """The largest page, in bytes, of a kernel that can load the library."""
        largest = _PAGE_SIZES.get(self.machine, _OTHER_PAGE_SIZE)
        return min(largest, *(s.p_align for s in self.loads))


def read_tables(source: ByteSource) -> ElfTables:
    """Read and check the tables.

    Raises:
        CannotCompactError: not a shared library of a 64-bit little-endian host, or with a layout
            that compaction doesn't know.
        FormatError: a table leaves the file.
    """
    header = source.read(0, min(EHDR.size, source.size))
    if len(header) < EHDR.size or header[:4] != b"\x7fELF":
        raise CannotCompactError(source.path, "not an ELF file")
    ident, e_type, machine, _, _, phoff, shoff, _, _, *counts = EHDR.unpack(header)
    phentsize, phnum, shentsize, shnum, strndx = counts
    for wrong, problem in (
        (ident[4] != 2, f"ELF class {ident[4]}, expected 2 (64 bit)"),
        (ident[5] != 1, f"ELF data encoding {ident[5]}, expected 1 (little endian)"),
        (e_type != ET_DYN, f"ELF type {e_type}, expected {ET_DYN} (a shared library)"),
        (phentsize != PHDR.size, f"e_phentsize {phentsize}, expected {PHDR.size}"),
        (shnum and shentsize != SHDR.size, f"e_shentsize {shentsize}, expected {SHDR.size}"),
        (phnum == 0xFFFF, "more than 65,534 program headers"),
        (
            bool(shoff) != bool(shnum) or shnum > SHN_LORESERVE - _SPARE_SECTIONS,
            f"e_shoff {shoff:#x} with e_shnum {shnum}, expected both or none and less than "
            f"{SHN_LORESERVE - _SPARE_SECTIONS} sections",
        ),
        (bool(shnum) and strndx >= shnum, f"e_shstrndx {strndx} of {shnum} sections"),
    ):
        if wrong:
            raise CannotCompactError(source.path, problem)
    segments = _read_program_headers(source, phoff, phnum)
    sections = _read_section_headers(source, shoff, shnum)
    tables = ElfTables(
        header=header,
        segments=segments,
        sections=sections,
        names=_read_names(source, sections, strndx),
        names_index=strndx,
        machine=machine,
    )
    for problem in itertools.chain(
        _segment_problems(tables, source.size), _section_problems(tables, source.size)
    ):
        raise CannotCompactError(source.path, problem)
    return tables


def read_at(
    source: ByteSource, tables: ElfTables, vaddr: int, size: int, *, partly: bool = False
) -> bytes:
    """The bytes at an address, as they are in the file.

    ``partly``: fewer where the segment ends before.

    Raises:
        CannotCompactError: they are in no PT_LOAD.
    """
    for load in tables.loads:
        left = load.p_vaddr + load.p_filesz - vaddr
        if load.p_vaddr <= vaddr and left > 0 and (partly or size <= left):
            return source.read(load.p_offset + vaddr - load.p_vaddr, min(size, left))
    raise CannotCompactError(
        source.path, f"a table of {size:#x} bytes at address {vaddr:#x} is in no PT_LOAD"
    )


def _read_program_headers(source: ByteSource, offset: int, count: int) -> tuple[ProgramHeader, ...]:
    data = source.read(offset, count * PHDR.size)
    return tuple(map(ProgramHeader._make, PHDR.iter_unpack(data)))


def _read_section_headers(source: ByteSource, offset: int, count: int) -> tuple[SectionHeader, ...]:
    data = source.read(offset, count * SHDR.size)
    return tuple(map(SectionHeader._make, SHDR.iter_unpack(data)))


def _read_names(
    source: ByteSource, sections: tuple[SectionHeader, ...], index: int
) -> tuple[bytes, ...]:
    if not sections:
        return ()
    table = sections[index]
    if not table.in_file or table.sh_size > _MAX_NAMES_SIZE:
        raise CannotCompactError(
            source.path, f"section {index}, which e_shstrndx names, holds no section names"
        )
    strings = source.read(table.sh_offset, table.sh_size)
    names = []
    for section in sections:
        end = strings.find(b"\0", section.sh_name)
        if end < 0:
            raise CannotCompactError(
                source.path, f"a section's name at {section.sh_name:#x} has no end"
            )
        names.append(strings[section.sh_name : end])
    return tuple(names)


def _segment_problems(tables: ElfTables, size: int) -> Iterator[str]:
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
        # One of zeros alone needs no bytes where it says that they would be.
        if load.p_filesz > load.p_memsz or (load.p_filesz and load.file_end > size):
            yield f"{where}: {load.p_filesz:#x} bytes in the file do not fit"
        if load.p_vaddr + load.p_memsz > _MAX_ADDRESS or load.p_paddr > _MAX_ADDRESS:
            yield f"{where}: leaves the address space"
        if load.p_align % _SMALLEST_PAGE or load.p_align & (load.p_align - 1) or not load.p_align:
            yield f"{where}: p_align {load.p_align:#x} is no page size"
        elif (load.p_vaddr - load.p_offset) % _SMALLEST_PAGE:
            # glibc asks for congruence modulo p_align up to 2.34, modulo the page from then on.
            yield f"{where}: p_offset {load.p_offset:#x} is not congruent to p_vaddr"
    for before, after in itertools.pairwise(loads):
        if before.p_vaddr + before.p_memsz > after.p_vaddr:
            yield f"PT_LOADs unsorted or overlapping at {after.p_vaddr:#x}"
    in_file = sorted((s for s in loads if s.p_filesz), key=lambda s: s.p_offset)
    for before, after in itertools.pairwise(in_file):
        if before.file_end > after.p_offset:
            yield f"PT_LOADs share the bytes of the file at {after.p_offset:#x}"
    for segment in tables.segments:
        if segment.p_type in (PT_LOAD, PT_NULL) or not segment.p_filesz:
            continue
        if not _is_loaded(loads, segment.p_offset, segment.p_vaddr, segment.p_filesz):
            yield f"segment of type {segment.p_type:#x} at {segment.p_vaddr:#x} is in no PT_LOAD"


def _section_problems(tables: ElfTables, size: int) -> Iterator[str]:
    for section, name in zip(tables.sections, tables.names, strict=True):
        if section.in_file and section.file_end > size:
            yield f"section {name.decode(errors='replace')} leaves the file"
        if section.loaded and section.sh_size:
            where = section.sh_offset, section.sh_addr, section.sh_size
            if not _is_loaded(tables.loads, *where):
                yield f"section {name.decode(errors='replace')} is in no PT_LOAD"
        if section.sh_link >= len(tables.sections):
            yield f"section {name.decode(errors='replace')}: sh_link {section.sh_link}"


def _is_loaded(loads: tuple[ProgramHeader, ...], offset: int, vaddr: int, size: int) -> bool:
    """Whether these bytes get to this address, if need be by PT_LOADs that follow each other."""
    end = vaddr + size
    for load in loads:
        load_end = load.p_vaddr + load.p_filesz
        same_shift = offset - load.p_offset == vaddr - load.p_vaddr
        if load.p_vaddr <= vaddr < load_end and same_shift:
            if end <= load_end:
                return True
            offset += load_end - vaddr
            vaddr = load_end
    return False
