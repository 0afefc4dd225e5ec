"""The rows of ELF tables, by name: of 64-bit little-endian files, host and cubin alike.

Fields, layouts and constants have their names from the System V gABI: chapter 4 (ELF header,
section headers, symbols, relocations) and chapter 5 (program headers, dynamic section). Constants
of GNU are in glibc's ``elf/elf.h``. Nothing is checked or interpreted here.

The program that certifies results (``rewriting/compact/certify.c``) has its own rows: it must not
share a mistake with the code that wrote the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Buffer = bytes | bytearray | memoryview
"""Bytes that hold a table."""

_Row = TypeVar("_Row", bound=tuple[Any, ...])


class RowLayout(Generic[_Row]):
    """Layout of a row in a file: a ``struct.Struct`` whose rows have names.

    Args:
        layout: the format, as of ``struct``.
        make: ``_make`` of the rows' ``NamedTuple``.

    Attributes:
        size: bytes of a row.
        struct: for a hot loop that unpacks each row into names of its own.
    """

    def __init__(self, layout: str, make: Callable[[Iterable[Any]], _Row]) -> None:
        self.struct = struct.Struct(layout)
        self.size = self.struct.size
        self._make = make

    def unpack_from(self, data: Buffer, offset: int = 0) -> _Row:
        """The row at ``offset``.

        Raises:
            struct.error: ``data`` ends before the row.
        """
        return self._make(self.struct.unpack_from(data, offset))

    def iter_unpack(self, data: Buffer) -> Iterator[_Row]:
        """All rows of a table.

        Raises:
            struct.error: ``data`` has no whole number of rows.
        """
        return map(self._make, self.struct.iter_unpack(data))

    def pack(self, row: _Row) -> bytes:
        """The bytes of a row."""
        return self.struct.pack(*row)


EI_CLASS, EI_DATA, EI_ABIVERSION = 4, 5, 8
ELFCLASS64, ELFDATA2LSB = 2, 1

ET_REL, ET_EXEC, ET_DYN = 1, 2, 3
EM_X86_64, EM_AARCH64, EM_CUDA = 62, 183, 190

PT_NULL, PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_PHDR, PT_TLS = 0, 1, 2, 3, 4, 6, 7
PT_GNU_EH_FRAME, PT_GNU_STACK, PT_GNU_RELRO = 0x6474E550, 0x6474E551, 0x6474E552
PT_GNU_PROPERTY, PT_GNU_SFRAME = 0x6474E553, 0x6474E554
PF_X, PF_W, PF_R = 1, 2, 4

SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_RELA = 0, 1, 2, 3, 4
SHT_DYNAMIC, SHT_NOTE, SHT_NOBITS, SHT_REL, SHT_DYNSYM = 6, 7, 8, 9, 11
SHF_ALLOC, SHF_EXECINSTR, SHF_TLS = 2, 4, 0x400
SHN_UNDEF, SHN_LORESERVE, SHN_ABS, SHN_XINDEX = 0, 0xFF00, 0xFFF1, 0xFFFF

STB_GLOBAL, STT_OBJECT, STT_FUNC, STT_SECTION = 1, 1, 2, 3

DT_NULL, DT_PLTRELSZ, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ = 0, 2, 4, 5, 6, 7, 8
DT_RELAENT, DT_STRSZ, DT_SYMENT, DT_SONAME, DT_JMPREL, DT_RELRSZ, DT_RELR = (
    9,
    10,
    11,
    14,
    23,
    35,
    36,
)
DT_RELACOUNT, DT_FLAGS_1, DF_1_PIE = 0x6FFFFFF9, 0x6FFFFFFB, 0x08000000
R_X86_64_64, R_X86_64_IRELATIVE = 1, 37
DT_NEEDED = 1


class ElfHeader(NamedTuple):
    """``Elf64_Ehdr``: offsets and sizes in bytes."""

    e_ident: bytes
    e_type: int
    e_machine: int
    e_version: int
    e_entry: int
    e_phoff: int
    e_shoff: int
    e_flags: int
    e_ehsize: int
    e_phentsize: int
    e_phnum: int
    e_shentsize: int
    e_shnum: int
    e_shstrndx: int


class ProgramHeader(NamedTuple):
    """``Elf64_Phdr``: one segment; offsets, addresses and sizes in bytes."""

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
        """File offset at which its bytes end."""
        return self.p_offset + self.p_filesz

    @property
    def protection(self) -> int:
        """Its flags as mmap(2) has them, where 1 is for reading and 4 for executing."""
        return (self.p_flags & PF_R) >> 2 | self.p_flags & PF_W | (self.p_flags & PF_X) << 2


class SectionHeader(NamedTuple):
    """``Elf64_Shdr``: one section; offsets, addresses and sizes in bytes."""

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
    def in_file(self) -> bool:
        """Whether it has bytes in the file."""
        return self.sh_type not in (SHT_NULL, SHT_NOBITS)

    @property
    def loaded(self) -> bool:
        """Whether its bytes lie in the file and get into memory."""
        return bool(self.sh_flags & SHF_ALLOC) and self.in_file

    @property
    def file_end(self) -> int:
        """File offset at which its bytes end."""
        return self.sh_offset + self.sh_size


class Symbol(NamedTuple):
    """``Elf64_Sym``: one row of a symbol table."""

    st_name: int
    st_info: int
    st_other: int
    st_shndx: int
    st_value: int
    st_size: int

    @property
    def type(self) -> int:
        """``STT_FUNC`` and the like: the lower half of ``st_info``."""
        return self.st_info & 0xF


class Relocation(NamedTuple):
    """``Elf64_Rela``; ``Elf64_Rel`` has its addend in the place that it changes."""

    r_offset: int
    r_info: int
    r_addend: int = 0

    @property
    def symbol(self) -> int:
        """Index in the symbol table: the upper half of ``r_info``."""
        return self.r_info >> 32


class DynamicEntry(NamedTuple):
    """``Elf64_Dyn``: one row of the dynamic section; ``d_val`` may be an address, too."""

    d_tag: int
    d_val: int


EHDR = RowLayout("<16sHHIQQQIHHHHHH", ElfHeader._make)
PHDR = RowLayout("<IIQQQQQQ", ProgramHeader._make)
SHDR = RowLayout("<IIQQQQIIQQ", SectionHeader._make)
SYM = RowLayout("<IBBHQQ", Symbol._make)
REL = RowLayout("<QQ", lambda row: Relocation(*row))
RELA = RowLayout("<QQq", Relocation._make)
DYN = RowLayout("<qQ", DynamicEntry._make)


def string_at(strings: bytes, offset: int) -> bytes | None:
    """The string at ``offset`` of a string table, without its NUL; None if it has no end."""
    end = strings.find(b"\0", offset)
    return strings[offset:end] if end >= 0 else None
