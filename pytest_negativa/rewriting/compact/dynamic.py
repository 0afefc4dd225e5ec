"""The dynamic section of a library, and what it says about the library's code.

Sources: System V gABI, chapter 5 (dynamic section, ``DT_RELR``); glibc's ``elf/elf.h``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from pytest_negativa.gpucode.elf import MARKER
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
    PT_DYNAMIC,
    RELA,
    SHN_UNDEF,
    SHT_DYNSYM,
    STT_GNU_IFUNC,
    SYM,
    DynamicEntry,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import Range
from pytest_negativa.rewriting.compact.original_tables import (
    ElfTables,
    read_at,
    read_tables,
    refuse_appended_data,
)
from pytest_negativa.rewriting.compact.records import CannotCompactError

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


def exports_resolvers(source: ByteSource, tables: ElfTables) -> bool:
    """Whether code of the library (IFUNC) runs when a symbol of it is looked up."""
    for section in tables.sections:
        if section.sh_type == SHT_DYNSYM:
            size = section.sh_size - section.sh_size % SYM.size
            rows = SYM.struct.iter_unpack(source.read(section.sh_offset, size))
            # The type is the lower half of st_info.
            if any(r[1] & 0xF == STT_GNU_IFUNC and r[3] != SHN_UNDEF for r in rows):
                return True
    return False


def read_dynamic(source: ByteSource, tables: ElfTables) -> dict[int, int]:
    """The dynamic section: tag to value; of several, the last counts, as for ld.so."""
    return {row.d_tag: row.d_val for row in dynamic_rows(source, tables)}


def dynamic_rows(source: ByteSource, tables: ElfTables) -> Iterator[DynamicEntry]:
    """The rows of the dynamic section, without the last."""
    segment = next(s for s in tables.segments if s.p_type == PT_DYNAMIC)
    size = segment.p_filesz - segment.p_filesz % DYN.size
    for row in DYN.iter_unpack(source.read(segment.p_offset, size)):
        if row.d_tag == DT_NULL:
            return
        yield row


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
