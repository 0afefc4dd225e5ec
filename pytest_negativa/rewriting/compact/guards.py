"""Finds the addresses of a library that the dynamic loader uses: their bytes must stay.

Only the driver reads GPU code. So if a relocation, a dynamic symbol or a table of the loader lies
in it, the bytes are not only GPU code, and stay. Code that reads by address alone is not seen here.

Sources: System V gABI, chapter 5 (dynamic section, ``DT_RELR``); glibc's ``elf/elf.h`` for the
GNU tags.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_negativa.gpucode.elf_tables import (
    DF_1_PIE,
    DT_FINI,
    DT_FINI_ARRAY,
    DT_FINI_ARRAYSZ,
    DT_FLAGS_1,
    DT_GNU_HASH,
    DT_HASH,
    DT_INIT,
    DT_INIT_ARRAY,
    DT_INIT_ARRAYSZ,
    DT_JMPREL,
    DT_NULL,
    DT_PLTGOT,
    DT_PLTREL,
    DT_PLTRELSZ,
    DT_REL,
    DT_RELA,
    DT_RELAENT,
    DT_RELASZ,
    DT_RELENT,
    DT_RELR,
    DT_RELRENT,
    DT_RELRSZ,
    DT_RELSZ,
    DT_STRSZ,
    DT_STRTAB,
    DT_SYMTAB,
    DT_VERDEF,
    DT_VERNEED,
    DT_VERSYM,
    DYN,
    EHDR,
    PHDR,
    PT_DYNAMIC,
    PT_GNU_STACK,
    PT_LOAD,
    PT_NULL,
    REL,
    RELA,
    SHF_EXECINSTR,
    SHF_TLS,
    SHN_ABS,
    SHN_UNDEF,
    SHT_DYNSYM,
    SHT_PROGBITS,
    STT_FUNC,
    STT_GNU_IFUNC,
    STT_SECTION,
    STT_TLS,
    SYM,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import Range, Span, intersection, union
from pytest_negativa.rewriting.compact.original_tables import ElfTables, read_at
from pytest_negativa.rewriting.compact.records import CannotCompactError

_FUNCTIONS = {STT_FUNC, STT_GNU_IFUNC}

# Tables of the loader, with the tag that holds their size if there is one.
_TABLES = {
    DT_HASH: None, DT_STRTAB: DT_STRSZ, DT_SYMTAB: None, DT_INIT: None, DT_FINI: None,
    DT_INIT_ARRAY: DT_INIT_ARRAYSZ, DT_FINI_ARRAY: DT_FINI_ARRAYSZ, DT_GNU_HASH: None,
    DT_VERSYM: None, DT_VERDEF: None, DT_VERNEED: None, DT_PLTGOT: None, DT_RELA: DT_RELASZ,
    DT_REL: DT_RELSZ, DT_JMPREL: DT_PLTRELSZ, DT_RELR: DT_RELRSZ,
}  # fmt: skip
# Android's packed relocations, and its number of DT_RELR before the gABI gave one.
_ANDROID = {0x6000000F, 0x60000011, 0x6FFFE000}
# Bytes that a relocation of a library writes at most. TLS descriptors are two such words
# (R_X86_64_TLSDESC, R_AARCH64_TLSDESC).
_WORD = 8
_TLS_DESCRIPTORS = {36, 1031}


@dataclass(frozen=True, slots=True)
class Guards:
    """Addresses in use by the loader.

    Attributes:
        targets: addresses that relocations write to, ascending.
        used: disjoint address ranges that must stay as they are.
        functions: addresses of functions by the dynamic symbols, in any section.
    """

    targets: tuple[int, ...]
    used: tuple[Span, ...]
    functions: tuple[int, ...] = ()

    def why_kept(self, start: int, end: int) -> str | None:
        """The loader's use of the addresses ``[start, end)``, or None."""
        if (target := self.find_target(start, end)) is not None:
            return f"a relocation writes to address {target:#x}"
        for used in intersection([(start, end)], self.used):
            return f"the loader or a dynamic symbol uses address {used.start:#x}"
        return None

    def find_target(self, start: int, end: int) -> int | None:
        """The first address in ``[start, end)`` that a relocation writes to, or None."""
        at = bisect.bisect_right(self.targets, start - _WORD)
        return self.targets[at] if at < len(self.targets) and self.targets[at] < end else None


def refuse_programs(source: ByteSource, tables: ElfTables) -> None:
    """Refuse programs without PT_INTERP (static PIE), which differ from libraries by a flag only.

    A kernel before Linux 5.18 finds a program's headers by load address plus ``e_phoff``.

    Raises:
        CannotCompactError: the file is a program.
    """
    dynamic = read_dynamic(source, tables)
    if dynamic.get(DT_FLAGS_1, 0) & DF_1_PIE:
        raise CannotCompactError(
            source.path, "is a program (DF_1_PIE); only libraries are compacted"
        )


def read_guards(source: ByteSource, tables: ElfTables) -> Guards:
    """Collect the addresses that the loader uses.

    Raises:
        CannotCompactError: the library has relocations of an unknown kind.
        FormatError: a table leaves the file.
    """
    dynamic = read_dynamic(source, tables)
    if _ANDROID & set(dynamic):
        raise CannotCompactError(source.path, "has Android's packed relocations")
    symbols = tuple(_defined_symbols(source, tables, dynamic))
    named = ((value, value + (size or 1)) for _, value, size in symbols)
    return Guards(
        targets=tuple(sorted(_relocation_targets(source, tables, dynamic))),
        used=union((*_header_ranges(tables), *_table_ranges(dynamic), *named)),
        functions=tuple(value for kind, value, _ in symbols if kind in _FUNCTIONS),
    )


def exports_resolvers(source: ByteSource, tables: ElfTables) -> bool:
    """Whether code of the library (IFUNC) runs when a symbol of it is looked up.

    Raises:
        CannotCompactError, FormatError: see ``read_guards``.
    """
    symbols = _defined_symbols(source, tables, read_dynamic(source, tables))
    return any(kind == STT_GNU_IFUNC for kind, _, _ in symbols)


def read_dynamic(source: ByteSource, tables: ElfTables) -> dict[int, int]:
    """The dynamic section: tag to value; of several, the last counts, as for ld.so."""
    segment = next(s for s in tables.segments if s.p_type == PT_DYNAMIC)
    size = segment.p_filesz - segment.p_filesz % DYN.size
    found: dict[int, int] = {}
    for tag, value in DYN.iter_unpack(source.read(segment.p_offset, size)):
        if tag == DT_NULL:
            break
        found[tag] = value
    return found


def _header_ranges(tables: ElfTables) -> Iterator[Range]:
    phoff = tables.header.e_phoff
    for load in tables.loads:
        if load.p_offset == 0:
            yield load.p_vaddr, load.p_vaddr + EHDR.size
        if load.p_offset <= phoff < load.file_end:
            start = load.p_vaddr + phoff - load.p_offset
            yield start, start + PHDR.size * len(tables.segments)
    for segment in tables.segments:
        if segment.p_type not in (PT_LOAD, PT_NULL, PT_GNU_STACK):
            yield segment.p_vaddr, segment.p_vaddr + segment.p_memsz
    for section in tables.sections:
        other = section.sh_type != SHT_PROGBITS or section.sh_flags & (SHF_EXECINSTR | SHF_TLS)
        if section.loaded and other:
            yield section.sh_addr, section.sh_addr + section.sh_size


def _table_ranges(dynamic: dict[int, int]) -> Iterator[Range]:
    for tag, size_tag in _TABLES.items():
        if tag in dynamic:
            size = dynamic.get(size_tag, 0) if size_tag is not None else 0
            yield dynamic[tag], dynamic[tag] + max(size, 1)


def _defined_symbols(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Type, address and size of the dynamic symbols that the library defines."""
    rows = SYM.struct.iter_unpack(_dynamic_symbols(source, tables, dynamic))
    for _name, info, _other, section, value, size in rows:
        # The type is the lower half of st_info.
        if section not in (SHN_UNDEF, SHN_ABS) and info & 0xF not in (STT_SECTION, STT_TLS):
            yield info & 0xF, value, size


def _dynamic_symbols(source: ByteSource, tables: ElfTables, dynamic: dict[int, int]) -> bytes:
    if not tables.sections:
        return b""
    table = next((s for s in tables.sections if s.sh_type == SHT_DYNSYM), None)
    # Only the section tells their number.
    if table is None or table.sh_addr != dynamic.get(DT_SYMTAB):
        raise CannotCompactError(source.path, "has no section with the dynamic symbols")
    return source.read(table.sh_offset, table.sh_size - table.sh_size % SYM.size)


def _relocation_targets(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int]
) -> list[int]:
    targets: list[int] = []
    rela = (DT_RELA, DT_RELASZ, DT_RELAENT, RELA.size)
    rel = (DT_REL, DT_RELSZ, DT_RELENT, REL.size)
    relr = (DT_RELR, DT_RELRSZ, DT_RELRENT, _WORD)
    for tag, size_tag, entry_tag, expected in (rela, rel, relr):
        if tag not in dynamic:
            continue
        if dynamic.get(entry_tag, expected) != expected:
            raise CannotCompactError(
                source.path, f"relocations of {dynamic[entry_tag]} bytes, expected {expected}"
            )
        data = read_at(source, tables, dynamic[tag], dynamic.get(size_tag, 0))
        targets += _relr_targets(data) if tag == DT_RELR else _offsets(data, expected)
    if DT_JMPREL in dynamic:
        layout = RELA if dynamic.get(DT_PLTREL, DT_RELA) == DT_RELA else REL
        data = read_at(source, tables, dynamic[DT_JMPREL], dynamic.get(DT_PLTRELSZ, 0))
        targets += _offsets(data, layout.size)
    return targets


def _offsets(data: bytes, entry_size: int) -> list[int]:
    # Both kinds of rows begin as a Rel; a library may have millions.
    whole = memoryview(data)[: len(data) - len(data) % entry_size]
    offsets: list[int] = whole.cast("Q")[:: entry_size // 8].tolist()
    # The type is the lower half of r_info; its lowest byte tells most.
    lowest = bytes(whole[8::entry_size])
    if not any(kind & 0xFF in lowest for kind in _TLS_DESCRIPTORS):
        return offsets
    types = whole.cast("I")[2 :: entry_size // 4].tolist()
    if not _TLS_DESCRIPTORS.isdisjoint(types):
        rows = zip(offsets, types, strict=True)
        offsets += [offset + _WORD for offset, kind in rows if kind in _TLS_DESCRIPTORS]
    return offsets


def _relr_targets(data: bytes) -> Iterator[int]:
    # An even entry is an address; an odd one a bitmap of the 63 words after the last.
    where = 0
    for (entry,) in struct.iter_unpack("<Q", memoryview(data)[: len(data) - len(data) % 8]):
        if entry & 1 == 0:
            yield entry
            where = entry + 8
            continue
        for bit in range(63):
            if entry >> (bit + 1) & 1:
                yield where + 8 * bit
        where += 63 * 8
