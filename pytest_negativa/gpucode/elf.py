"""Host ELF file to sections, soname, build id; refused files (Windows, Mach-O); limits of tables.

A file may be crafted or damaged. This module checks the header first, and limits the bytes that it
reads of the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pytest_negativa.errors import FormatError, NotElfError
from pytest_negativa.gpucode.elf_tables import (
    DT_NULL,
    DT_SONAME,
    DYN,
    EHDR,
    EI_CLASS,
    EI_DATA,
    ELFCLASS64,
    ELFDATA2LSB,
    EM_CUDA,
    ET_REL,
    PHDR,
    PT_LOAD,
    SHDR,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_TLS,
    SHN_LORESERVE,
    SHT_DYNAMIC,
    SHT_NOBITS,
    SHT_NOTE,
    ElfHeader,
    ProgramHeader,
    SectionHeader,
    string_at,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.build_id import find_build_id
from pytest_negativa.models.file_kinds import ELF_MAGIC, HEAD_SIZE, FileKind, kind_of

# Bytes of tables that are read of one file, names counted one by one. An object file of 65,000
# sections needs half, libtorch_cuda.so 1%.
_READ_BUDGET = 128 << 20
# An archive may have thousands of members, so a small file has a small budget. Files of many
# sections need 16 times their size.
_MIN_READ_BUDGET = 1 << 20
_READ_RATIO = 64

MARKER = b".negativa"
"""Name of a section, never loaded, in a slimmed library: JSON about the original."""

# Bytes: PATH_MAX of Linux.
_LONGEST_STRING = 4096


class ElfTables(NamedTuple):
    """The tables of a host ELF file, row by row.

    Attributes:
        header: the ELF header.
        segments: the program headers.
        sections: the section headers.
        names: a name for each section; empty if it lies nowhere.
    """

    header: ElfHeader
    segments: tuple[ProgramHeader, ...]
    sections: tuple[SectionHeader, ...]
    names: tuple[bytes, ...]

    @property
    def loads(self) -> tuple[ProgramHeader, ...]:
        """The segments that are mapped."""
        return tuple(s for s in self.segments if s.p_type == PT_LOAD)


class HostSection(NamedTuple):
    """A section whose bytes lie in the file and are loaded at run time.

    Attributes:
        content: the kind of bytes that are GPU code from end to end; None for a section.
        member: of an archive, the member that holds it.
    """

    name: str
    offset: int
    size: int
    vaddr: int
    executable: bool
    content: FileKind | None = None
    member: str | None = None


class HostElf(NamedTuple):
    """The facts about a library apart from its GPU code.

    Attributes:
        build_id: hex of the GNU build id, if it has one.
        soname: ``DT_SONAME``, if it has one.
        sections: allocated sections with bytes in the file.
        zeros: allocated sections without; their ``offset`` says nothing.
        segments: the program headers.
        marker: offset and size of the section ``MARKER``, if there is one.
        kind: what the file is.
        faults: why members of an archive can't be read, with their file offsets.
    """

    build_id: str | None
    soname: str | None
    sections: tuple[HostSection, ...]
    zeros: tuple[HostSection, ...] = ()
    segments: tuple[ProgramHeader, ...] = ()
    marker: tuple[int, int] | None = None
    kind: FileKind = FileKind.LIBRARY
    faults: tuple[tuple[int, str], ...] = ()


def read_host_elf(source: ByteSource) -> HostElf:
    """Read identity, sections and program headers of a host ELF file.

    Raises:
        FormatError: not an ELF file, not one for a 64-bit little-endian host, without
            section headers, or with tables that leave the file.
    """
    return _read(_Tables(source))


def read_tables(source: ByteSource) -> ElfTables:
    """Read the header and the rows of a host ELF file.

    Raises:
        FormatError: see ``read_host_elf``.
    """
    return _Tables(source).read_all()


# By first bytes. What can be unpacked holds libraries that can be read.
_UNKNOWN = "no library or program (ELF), no other file with GPU code and no archive"
_UNPACK = "which is not read; unpack it, and name the folder"
_FOREIGN = {
    b"!<thin>": "a thin archive, whose members are files of their own; name these",
    b"MZ": "a program or DLL of Windows, which is not read",
    b"\xcf\xfa\xed\xfe": "a Mach-O file of macOS, which is not read",
    b"\xed\xab\xee\xdb": f"an RPM package, {_UNPACK}",
    b"hsqs": f"a SquashFS image, {_UNPACK}",
    b"7z\xbc\xaf": f"a 7z archive, {_UNPACK}",
}


def _check_magic(source: ByteSource) -> ElfHeader:
    if source.size == 0:
        raise FormatError(source.path, None, "is empty, expected an ELF file")
    head = source.read(0, min(HEAD_SIZE, source.size))
    if not head.startswith(ELF_MAGIC):
        kind = kind_of(head)
        if kind is not None:
            problem = f"is {kind.described}; expected a library or program (ELF)"
            raise FormatError(source.path, None, problem)
        foreign = (text for magic, text in _FOREIGN.items() if head.startswith(magic))
        raise NotElfError(source.path, None, f"is {next(foreign, _UNKNOWN)}")
    if source.size < EHDR.size:
        raise FormatError(
            source.path,
            0,
            f"truncated ELF header: {source.size} bytes, expected {EHDR.size} or more",
        )
    header = EHDR.unpack_from(source.read(0, EHDR.size))
    elf_class, encoding = header.e_ident[EI_CLASS], header.e_ident[EI_DATA]
    if elf_class != ELFCLASS64:
        raise FormatError(
            source.path, 4, f"ELF class {elf_class}, expected 2 (64 bit); CUDA libraries are 64 bit"
        )
    if encoding != ELFDATA2LSB:
        raise FormatError(
            source.path, 5, f"ELF data encoding {encoding}, expected 1 (little endian)"
        )
    if header.e_machine == EM_CUDA:
        raise FormatError(
            source.path, 18, "is a bare cubin (machine EM_CUDA), expected a host library around it"
        )
    return header


def _read_header(source: ByteSource) -> ElfHeader:
    """Read the header of a host ELF file with section headers."""
    header = _check_magic(source)
    start, count = header.e_shoff, header.e_shnum
    if start == 0 or count == 0:
        raise FormatError(
            source.path,
            0x28,
            "has no section headers (stripped by sstrip or a packer?), so nothing tells GPU code "
            "from other data; it is left alone",
        )
    if header.e_shentsize != SHDR.size:
        raise FormatError(
            source.path, 0x3A, f"e_shentsize {header.e_shentsize}, expected {SHDR.size}"
        )
    # gABI: with SHN_LORESERVE sections or more, e_shnum is 0 and section 0 holds the count. No
    # known library comes near it, and it would make every look-up here slow.
    if count >= SHN_LORESERVE or header.e_shstrndx >= count:
        raise FormatError(
            source.path,
            0x3C,
            f"e_shnum {count} and e_shstrndx {header.e_shstrndx} do not fit together",
        )
    end = start + count * SHDR.size
    if end > source.size:
        raise FormatError(
            source.path,
            start,
            f"section headers end at {end:#x}, past the end of the file at {source.size:#x}; "
            "is it truncated?",
        )
    return header


def _read(tables: _Tables) -> HostElf:
    sections: list[HostSection] = []
    zeros: list[HostSection] = []
    build_id = soname = marker = None
    header, segments, rows, names = tables.read_all()
    for row, bare_name in zip(rows, names, strict=True):
        name = bare_name.decode(errors="replace")
        if row.sh_type == SHT_NOBITS:
            # Thread-local zeros take no address of the library (gABI, chapter 4, SHF_TLS).
            if row.sh_flags & (SHF_ALLOC | SHF_TLS) == SHF_ALLOC:
                zeros.append(_host_section(row, name))
            continue
        if row.sh_type == SHT_NOTE:
            build_id = build_id or find_build_id(tables.read(row.sh_offset, row.sh_size))
        elif row.sh_type == SHT_DYNAMIC:
            soname = soname or _find_soname(rows, row, tables)
        if not row.loaded:
            if bare_name == MARKER:
                marker = row.sh_offset, row.sh_size
            continue
        if row.file_end > tables.source.size:
            raise FormatError(
                tables.source.path,
                row.sh_offset,
                f"section {name} ends at {row.file_end:#x}, past the end of the file at "
                f"{tables.source.size:#x}; is it truncated?",
            )
        sections.append(_host_section(row, name))
    _check_overlap(tables.source, sections)
    return HostElf(
        build_id=build_id,
        soname=soname,
        sections=tuple(sections),
        zeros=tuple(zeros),
        segments=segments,
        marker=marker,
        kind=FileKind.OBJECT if header.e_type == ET_REL else FileKind.LIBRARY,
    )


def _host_section(row: SectionHeader, name: str) -> HostSection:
    return HostSection(
        name=name,
        offset=row.sh_offset,
        size=row.sh_size,
        vaddr=row.sh_addr,
        executable=bool(row.sh_flags & SHF_EXECINSTR),
    )


def _check_overlap(source: ByteSource, sections: list[HostSection]) -> None:
    # Sound sections never share bytes. Crafted ones could have the file searched 65,000 times.
    filled = sorted((s for s in sections if s.size), key=lambda s: s.offset)
    for before, after in itertools.pairwise(filled):
        if before.offset + before.size > after.offset:
            raise FormatError(
                source.path,
                after.offset,
                f"section {after.name} overlaps section {before.name}, which ends at "
                f"{before.offset + before.size:#x}; crafted or damaged",
            )


def _find_soname(
    rows: Sequence[SectionHeader], dynamic: SectionHeader, tables: _Tables
) -> str | None:
    if dynamic.sh_link >= len(rows):
        raise FormatError(
            tables.source.path,
            dynamic.sh_offset,
            f"damaged ELF file: the dynamic section has its strings in section {dynamic.sh_link} "
            f"of {len(rows)}",
        )
    size = dynamic.sh_size - dynamic.sh_size % DYN.size
    for entry in DYN.iter_unpack(tables.read(dynamic.sh_offset, size)):
        if entry.d_tag == DT_NULL:
            break
        if entry.d_tag == DT_SONAME:
            return tables.string(rows[dynamic.sh_link].sh_offset + entry.d_val)
    return None


class _Tables:
    """Reads the tables of a file until the budget is spent.

    Tables of a crafted file can name the same bytes again and again, such as a string of
    megabytes for each of 65,000 sections.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self._left = min(_READ_BUDGET, _MIN_READ_BUDGET + source.size * _READ_RATIO)

    def read(self, offset: int, size: int) -> bytes:
        """Read a table.

        Raises:
            FormatError: it leaves the file, or the budget is spent.
        """
        self._spend(size)
        return self.source.read(offset, size)

    def read_all(self) -> ElfTables:
        """Header, segments, sections and their names.

        The names are read as far as they lie in the file: they are for people.
        """
        header = _read_header(self.source)
        rows = tuple(SHDR.iter_unpack(self.read(header.e_shoff, header.e_shnum * SHDR.size)))
        table = rows[header.e_shstrndx]
        size = min(table.sh_size, self.source.size - table.sh_offset)
        strings = self.read(table.sh_offset, size) if table.in_file and size > 0 else b""
        names = tuple(self._name(strings, row) for row in rows)
        segments = PHDR.iter_unpack(self.read(header.e_phoff, header.e_phnum * PHDR.size))
        return ElfTables(header, tuple(segments), rows, names)

    def _name(self, strings: bytes, row: SectionHeader) -> bytes:
        name = string_at(strings, row.sh_name) or b""
        self._spend(len(name))
        return name

    def string(self, offset: int) -> str:
        """The string at an offset of the file."""
        size = max(min(_LONGEST_STRING, self.source.size - offset), 0)
        return self.read(offset, size).partition(b"\0")[0].decode(errors="replace")

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise FormatError(
                self.source.path,
                None,
                "the ELF tables take too much reading, as if they overlapped; crafted or damaged",
            )
