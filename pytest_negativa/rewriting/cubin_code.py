"""Overwrites unused functions inside an unpacked cubin, and takes them out of its tables.

What the plan calls unused it took from symbols and call graph. Here the cubin's section and
relocation tables are the second witness. The driver places each section by itself, so code
or data of one section can refer to another section only through a relocation. A section to which
one that stays refers stays, too, whatever the plan says.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise

from pytest_negativa.gpucode.cubin import (
    SYMBOL,
    is_cubin_header,
    section_bytes,
    section_headers,
)
from pytest_negativa.gpucode.elf import ELF_HEADER
from pytest_negativa.gpucode.elf_tables import SectionHeader
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.models.plan import CodeRange
from pytest_negativa.rewriting.cubin_tables import CubinTables
from pytest_negativa.rewriting.edits import Edits, Fill

# gABI.
_SHT_PROGBITS = 1
_SHT_RELA = 4
_SHT_NOBITS = 8
_SHT_REL = 9
_SHF_ALLOC = 0x2
_SHF_EXECINSTR = 0x4
# r_offset, r_info (symbol in the upper half), and r_addend where there is one.
_RELOCATIONS = {_SHT_REL: struct.Struct("<QQ"), _SHT_RELA: struct.Struct("<QQq")}
# "cuobjdump -elf" prints .nv.capmerc.text.NAME in cubins from sm_100 on: code in a second form.
_CAPSULE_TYPE = 0x70000016


class CubinCodeError(Exception):
    """Why the code of a cubin is left as it is; the caller knows the file and the offset."""


def overwrite_code(cubin: bytes, unused: Sequence[CodeRange], value: int) -> Edits:
    """The edits of an unpacked cubin that overwrite functions, and let no table name them.

    What code or data that stays refers to is not touched.

    Args:
        cubin: unpacked.
        unused: the functions, as offsets in the cubin.
        value: the byte that their code becomes.

    Returns:
        A fill for each function that is overwritten, and patches for the tables.

    Raises:
        CubinCodeError: the tables of the cubin are not as expected, or ``unused`` is no code.
    """
    try:
        sections = _sections(cubin)
        found = _sections_of(sections, unused)
        _check_apart(cubin, sections)
        tables = CubinTables(cubin, sections)
        owner = tables.owned_by(found)
        referred = _referred(cubin, sections, found.keys(), owner)
        code = found.keys() - referred
        patches = tables.remove(
            code, {index for index, of in owner.items() if of in code} - referred
        )
        fills = (Fill(found[index].start, found[index].end, value) for index in code)
        return Edits.of(len(cubin), (*fills, *patches))
    except (PayloadError, ValueError) as e:
        raise CubinCodeError(str(e)) from e


def _sections(cubin: bytes) -> list[SectionHeader]:
    if not is_cubin_header(cubin) or len(cubin) < ELF_HEADER.size:
        raise CubinCodeError("not a cubin")
    return section_headers(cubin)


def _sections_of(
    sections: list[SectionHeader], unused: Sequence[CodeRange]
) -> dict[int, CodeRange]:
    """The sections that ``unused`` fills, each from its start to its end, by index."""
    by_range: dict[CodeRange, int] = {}
    for index, (_, kind, flags, _, offset, size, *_) in enumerate(sections):
        if kind == _CAPSULE_TYPE:
            raise CubinCodeError("has its code in a second form, which is not understood")
        if kind == _SHT_PROGBITS and flags & _SHF_EXECINSTR:
            by_range[CodeRange(offset, offset + size)] = index
    for code in unused:
        if code not in by_range:
            raise CubinCodeError(
                f"the unused code [{code.start:#x}, {code.end:#x}) is no section of its own"
            )
    return {by_range[code]: code for code in unused}


def _check_apart(cubin: bytes, sections: list[SectionHeader]) -> None:
    """No byte of the cubin is in two of its sections or tables, as in all that NVIDIA makes."""
    header = ELF_HEADER.unpack_from(cubin)
    taken = [
        (0, ELF_HEADER.size),
        (header[5], header[5] + header[9] * header[10]),
        (header[6], header[6] + header[11] * header[12]),
    ]
    taken += [(s[4], s[4] + s[5]) for s in sections if s[1] != _SHT_NOBITS]
    # An empty one lies in nobody's way.
    for (_, end), (start, _) in pairwise(sorted(t for t in taken if t[0] < t[1])):
        if end > start:
            raise CubinCodeError(f"the section or table at {start:#x} overlaps what is before it")


def _referred(
    cubin: bytes, sections: list[SectionHeader], code: Set[int], owner: Mapping[int, int]
) -> frozenset[int]:
    """What can be reached from a section that is loaded and stays: of ``code`` and what it owns."""
    candidates = frozenset(code | owner.keys())
    owned: defaultdict[int, set[int]] = defaultdict(set)
    for index, of in owner.items():
        owned[of].add(index)
    tables: defaultdict[int, list[SectionHeader]] = defaultdict(list)
    for section in sections:
        target = section[7]
        if section[1] not in _RELOCATIONS or not section[5]:
            continue
        if target >= len(sections) or section[6] >= len(sections):
            raise CubinCodeError("a relocation table names sections that are not there")
        # Debugging information refers to everything and is not loaded.
        if sections[target][2] & _SHF_ALLOC:
            tables[target].append(section)
    symbols: dict[int, dict[int, int]] = {}
    referred: set[int] = set()
    waiting = [target for target in tables if target not in candidates]
    while waiting:
        for table in tables[waiting.pop()]:
            if table[6] not in symbols:
                symbols[table[6]] = _symbols_in(cubin, sections[table[6]], candidates)
            known = symbols[table[6]]
            new = {known[s] for s in _symbols_of(cubin, table) if s in known} - referred
            # Code stays with all that is its own, and what is its own never without it: a table
            # of such a section is the function's, too.
            functions = {owner.get(one, one) for one in new}
            new |= functions.union(*(owned[of] for of in functions)) - referred
            referred |= new
            waiting += new
    return frozenset(referred)


def _symbols_of(cubin: bytes, table: SectionHeader) -> Iterator[int]:
    """The symbols that a relocation table names, by index."""
    layout = _RELOCATIONS[table[1]]
    rows = section_bytes(cubin, table, "relocations")
    if len(rows) % layout.size:
        raise CubinCodeError(f"{len(rows)} bytes of relocations, expected whole entries")
    return (row[1] >> 32 for row in layout.iter_unpack(rows))


def _symbols_in(cubin: bytes, table: SectionHeader, wanted: frozenset[int]) -> dict[int, int]:
    """The symbols that lie in the sections ``wanted``: section by symbol, both by index."""
    rows = section_bytes(cubin, table, "symbol table")
    if len(rows) % SYMBOL.size:
        raise CubinCodeError(f"symbol table of {len(rows)} bytes, expected whole entries")
    return {
        index: symbol[3]
        for index, symbol in enumerate(SYMBOL.iter_unpack(rows))
        if symbol[3] in wanted
    }
