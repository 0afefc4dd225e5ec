"""Overwrites unused functions inside an unpacked cubin, and takes them out of its tables.

The plan finds unused functions by symbols and call graph. This module confirms them by the section
and relocation tables. The driver places each section by itself, so one section can refer to another
only through a relocation. A section stays if a section that stays refers to it, even if the plan
calls it unused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise

from pytest_negativa.gpucode.cubin import section_bytes, section_headers
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    REL,
    RELA,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_NOBITS,
    SHT_PROGBITS,
    SHT_REL,
    SHT_RELA,
    Relocation,
    SectionHeader,
)
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.rows import RowLayout
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting.cubin_tables import CubinTables, symbol_rows
from pytest_negativa.rewriting.edits import Edits, Fill

_RELOCATIONS: dict[int, RowLayout[Relocation]] = {SHT_REL: REL, SHT_RELA: RELA}
# "cuobjdump -elf" prints .nv.capmerc.text.NAME in cubins from sm_100 on, see planning.decide.
_CAPSULE_TYPE = 0x70000016


class CubinCodeError(Exception):
    """The reason to leave the code of a cubin alone; the caller adds the file and the offset."""


def overwrite_code(cubin: bytes, unused: Sequence[Span], value: int) -> Edits:
    """The edits of an unpacked cubin that overwrite functions, and let no table name them.

    A function stays if code or data that stays refers to it.

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
        sections = section_headers(cubin)
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


def _sections_of(sections: list[SectionHeader], unused: Sequence[Span]) -> dict[int, Span]:
    """The sections that the unused code fills from start to end, by index."""
    by_range: dict[Span, int] = {}
    for index, section in enumerate(sections):
        if section.sh_type == _CAPSULE_TYPE:
            raise CubinCodeError("its functions have capsules, whose readers reject other code")
        if section.sh_type == SHT_PROGBITS and section.sh_flags & SHF_EXECINSTR:
            by_range[Span(section.sh_offset, section.file_end)] = index
    for code in unused:
        if code not in by_range:
            raise CubinCodeError(
                f"the unused code [{code.start:#x}, {code.end:#x}) is no section of its own"
            )
    return {by_range[code]: code for code in unused}


def _check_apart(cubin: bytes, sections: list[SectionHeader]) -> None:
    """Check that no byte is in two sections or tables, as in all cubins of NVIDIA's compilers."""
    header = EHDR.unpack_from(cubin)
    taken = [
        (0, EHDR.size),
        (header.e_phoff, header.e_phoff + header.e_phentsize * header.e_phnum),
        (header.e_shoff, header.e_shoff + header.e_shentsize * header.e_shnum),
    ]
    taken += [(s.sh_offset, s.file_end) for s in sections if s.sh_type != SHT_NOBITS]
    # An empty section overlaps nothing.
    for (_, end), (start, _) in pairwise(sorted((s, e) for s, e in taken if s < e)):
        if end > start:
            raise CubinCodeError(f"the section or table at {start:#x} overlaps what is before it")


def _referred(
    cubin: bytes, sections: list[SectionHeader], code: Set[int], owner: Mapping[int, int]
) -> frozenset[int]:
    """The sections of ``code``, and those it owns, that a loaded section that stays refers to."""
    candidates = frozenset(code | owner.keys())
    owned: defaultdict[int, set[int]] = defaultdict(set)
    for index, of in owner.items():
        owned[of].add(index)
    tables: defaultdict[int, list[SectionHeader]] = defaultdict(list)
    for section in sections:
        target = section.sh_info
        if section.sh_type not in _RELOCATIONS or not section.sh_size:
            continue
        if target >= len(sections) or section.sh_link >= len(sections):
            raise CubinCodeError("a relocation table names sections that are not there")
        # Debugging information refers to everything and is not loaded.
        if sections[target].sh_flags & SHF_ALLOC:
            tables[target].append(section)
    symbols: dict[int, dict[int, int]] = {}
    referred: set[int] = set()
    waiting = [target for target in tables if target not in candidates]
    while waiting:
        for table in tables[waiting.pop()]:
            link = table.sh_link
            if link not in symbols:
                symbols[link] = _symbols_in(cubin, sections[link], candidates)
            known = symbols[link]
            new = {known[s] for s in _symbols_of(cubin, table) if s in known} - referred
            # A function stays with all sections it owns, and none of these stays without it: the
            # relocation table of an owned section is the function's, too.
            functions = {owner.get(one, one) for one in new}
            new |= functions.union(*(owned[of] for of in functions)) - referred
            referred |= new
            waiting += new
    return frozenset(referred)


def _symbols_of(cubin: bytes, table: SectionHeader) -> Iterator[int]:
    """The symbols that a relocation table names, by index."""
    layout = _RELOCATIONS[table.sh_type]
    rows = section_bytes(cubin, table, "relocations", layout.size)
    return (row.symbol for row in layout.iter_unpack(rows))


def _symbols_in(cubin: bytes, table: SectionHeader, wanted: frozenset[int]) -> dict[int, int]:
    """The symbols that lie in the sections ``wanted``: section by symbol, both by index."""
    rows = enumerate(symbol_rows(cubin, table))
    return {index: section for index, (_, _, _, section, _, _) in rows if section in wanted}
