"""Which addresses of a library the dynamic loader reads or writes: they must stay as they are.

GPU code is data that nobody but the driver looks at. So a relocation into it, a dynamic symbol
in it or a table of the loader there means that it is something else than it seems, and that it
is kept. What code reads by address alone is not seen here.

Sources: System V gABI, chapter 5 (dynamic section, ``DT_RELR``); glibc's ``elf/elf.h`` for the
GNU tags.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.elf_tables import (
    DYN,
    EHDR,
    PHDR,
    PT_DYNAMIC,
    PT_GNU_STACK,
    PT_LOAD,
    PT_NULL,
    SHF_EXECINSTR,
    SHF_TLS,
    SHT_DYNSYM,
    SHT_PROGBITS,
    ElfTables,
    read_at,
)
from pytest_negativa.rewriting.compact.records import CannotCompactError

SYMBOL = struct.Struct("<IBBHQQ")
_STT_SECTION, _STT_TLS = 3, 6
# STT_FUNC, STT_GNU_IFUNC.
_FUNCTIONS = {2, 10}
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1

_DT_NULL, _DT_PLTRELSZ, _DT_SYMTAB = 0, 2, 6
_DT_RELA, _DT_RELASZ, _DT_RELAENT = 7, 8, 9
_DT_REL, _DT_RELSZ, _DT_RELENT = 17, 18, 19
_DT_PLTREL, _DT_JMPREL = 20, 23
_DT_RELRSZ, _DT_RELR, _DT_RELRENT = 35, 36, 37
_DT_FLAGS_1, _DF_1_PIE = 0x6FFFFFFB, 0x08000000
# Tables of the loader, with the tag that holds their size where there is one: DT_HASH, DT_STRTAB,
# DT_SYMTAB, DT_INIT, DT_FINI, DT_INIT_ARRAY, DT_FINI_ARRAY, DT_GNU_HASH, DT_VERSYM, DT_VERDEF,
# DT_VERNEED, DT_PLTGOT.
_TABLES = {
    4: None, 5: 10, _DT_SYMTAB: None, 12: None, 13: None, 25: 27, 26: 28, 0x6FFFFEF5: None,
    0x6FFFFFF0: None, 0x6FFFFFFC: None, 0x6FFFFFFE: None, 3: None, _DT_RELA: _DT_RELASZ,
    _DT_REL: _DT_RELSZ, _DT_JMPREL: _DT_PLTRELSZ, _DT_RELR: _DT_RELRSZ,
}  # fmt: skip
# Packed relocations of Android, and its DT_RELR before that had a number of its own.
_ANDROID = {0x6000000F, 0x60000011, 0x6FFFE000}
# What a relocation of a library writes at most, in bytes; but for TLS descriptors, which are two
# words (R_X86_64_TLSDESC, R_AARCH64_TLSDESC).
_WORD = 8
_TLS_DESCRIPTORS = {36, 1031}


@dataclass(frozen=True, slots=True)
class Guards:
    """Addresses in use by the loader.

    Attributes:
        targets: where relocations write, ascending.
        starts, ends: disjoint ascending address ranges that must stay as they are.
        functions: where dynamic symbols say that code begins, in whatever section.
    """

    targets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    functions: tuple[int, ...] = ()

    def why_kept(self, start: int, end: int) -> str | None:
        """What the loader has to do with the addresses ``[start, end)``, or None."""
        at = bisect.bisect_right(self.targets, start - _WORD)
        if at < len(self.targets) and self.targets[at] < end:
            return f"a relocation writes to address {self.targets[at]:#x}"
        at = bisect.bisect_right(self.ends, start)
        if at < len(self.starts) and self.starts[at] < end:
            return f"the loader or a dynamic symbol uses address {max(start, self.starts[at]):#x}"
        return None


def refuse_programs(source: ByteSource, tables: ElfTables) -> None:
    """Programs without PT_INTERP (static PIE) look like libraries but for a flag.

    A kernel before Linux 5.18 finds a program's headers by load address plus ``e_phoff``.

    Raises:
        CannotCompactError: a program.
    """
    dynamic = read_dynamic(source, tables)
    if dynamic.get(_DT_FLAGS_1, 0) & _DF_1_PIE:
        raise CannotCompactError(
            source.path, "is a program (DF_1_PIE); only libraries are compacted"
        )


def read_guards(source: ByteSource, tables: ElfTables) -> Guards:
    """Collect what the loader uses.

    Raises:
        CannotCompactError: relocations of a kind that is not known.
        FormatError: a table leaves the file.
    """
    dynamic = read_dynamic(source, tables)
    if _ANDROID & set(dynamic):
        raise CannotCompactError(source.path, "has Android's packed relocations")
    symbols = tuple(_defined_symbols(source, tables, dynamic))
    ranges = sorted(
        (start, end)
        for start, end in (
            *_header_ranges(tables),
            *_table_ranges(dynamic),
            *((value, value + max(size, 1)) for _, value, size in symbols),
        )
        if end > start
    )
    starts: list[int] = []
    ends: list[int] = []
    for start, end in ranges:
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    targets = sorted(_relocation_targets(source, tables, dynamic))
    return Guards(
        targets=tuple(targets),
        starts=tuple(starts),
        ends=tuple(ends),
        functions=tuple(value for kind, value, _ in symbols if kind in _FUNCTIONS),
    )


def read_dynamic(source: ByteSource, tables: ElfTables) -> dict[int, int]:
    """The dynamic section: tag to value, the last where there are several, as for ld.so."""
    segment = next(s for s in tables.segments if s.p_type == PT_DYNAMIC)
    size = segment.p_filesz - segment.p_filesz % DYN.size
    found: dict[int, int] = {}
    for tag, value in DYN.iter_unpack(source.read(segment.p_offset, size)):
        if tag == _DT_NULL:
            break
        found[tag] = value
    return found


def _header_ranges(tables: ElfTables) -> Iterator[tuple[int, int]]:
    phoff = EHDR.unpack(tables.header)[5]
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


def _table_ranges(dynamic: dict[int, int]) -> Iterator[tuple[int, int]]:
    for tag, size_tag in _TABLES.items():
        if tag in dynamic:
            size = dynamic.get(size_tag, 0) if size_tag is not None else 0
            yield dynamic[tag], dynamic[tag] + max(size, 1)


def _defined_symbols(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Type, address and size of the dynamic symbols that name something in the library."""
    if not tables.sections:
        return
    table = next((s for s in tables.sections if s.sh_type == SHT_DYNSYM), None)
    # Nothing but the section tells how many there are.
    if table is None or table.sh_addr != dynamic.get(_DT_SYMTAB):
        raise CannotCompactError(source.path, "has no section with the dynamic symbols")
    data = source.read(table.sh_offset, table.sh_size - table.sh_size % SYMBOL.size)
    for _, info, _, section, value, size in SYMBOL.iter_unpack(data):
        if section not in (_SHN_UNDEF, _SHN_ABS) and info & 15 not in (_STT_SECTION, _STT_TLS):
            yield info & 15, value, size


def _relocation_targets(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int]
) -> Iterator[int]:
    rela = (_DT_RELA, _DT_RELASZ, _DT_RELAENT, 24)
    rel = (_DT_REL, _DT_RELSZ, _DT_RELENT, 16)
    relr = (_DT_RELR, _DT_RELRSZ, _DT_RELRENT, 8)
    for tag, size_tag, entry_tag, expected in (rela, rel, relr):
        if tag not in dynamic:
            continue
        if dynamic.get(entry_tag, expected) != expected:
            raise CannotCompactError(
                source.path, f"relocations of {dynamic[entry_tag]} bytes, expected {expected}"
            )
        data = read_at(source, tables, dynamic[tag], dynamic.get(size_tag, 0))
        yield from _relr_targets(data) if tag == _DT_RELR else _offsets(data, expected)
    if _DT_JMPREL in dynamic:
        entry = 24 if dynamic.get(_DT_PLTREL, _DT_RELA) == _DT_RELA else 16
        data = read_at(source, tables, dynamic[_DT_JMPREL], dynamic.get(_DT_PLTRELSZ, 0))
        yield from _offsets(data, entry)


def _offsets(data: bytes, entry_size: int) -> Iterator[int]:
    whole = memoryview(data)[: len(data) - len(data) % entry_size]
    for offset, info in struct.iter_unpack(f"<QQ{entry_size - 16}x", whole):
        yield offset
        if info & 0xFFFFFFFF in _TLS_DESCRIPTORS:
            yield offset + _WORD


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
