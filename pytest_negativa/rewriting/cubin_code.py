"""Unused functions inside a cubin, overwritten and out of its tables; those still referred to.

The plan finds unused functions by symbols and call graph. This module confirms them by the section
and relocation tables. The driver places each section by itself, so one section can refer to another
only through a relocation. A section stays if a section that stays refers to it, even if the plan
calls it unused.

A lookup of a function that is gone from the tables fails with CUDA_ERROR_NOT_FOUND instead of
running overwritten code. The driver allocates no device memory for it, and its name compresses to
nothing. Every section and symbol keeps its index, and every byte that stays keeps its offset. The
rules were tried with real cubins on an H200 with driver 580.159, lazy and eager:

- A section for a function, such as ``.nv.info.NAME``, may become SHT_NULL with its content zeros.
  If it keeps its type, the driver refuses the cubin (CUDA_ERROR_INVALID_IMAGE).
- A code section may be cut to its first 16 bytes, but not to none. Any number of code sections may
  be called ``.text.``. Without a name, or as SHT_NULL, lazy loading refuses some cubins. The driver
  looks kernels up by the name of this section, not by that of the symbol.
- A symbol in a code section may lose name, value and size. If it loses its section, the driver
  fails (CUDA_ERROR_UNKNOWN), because the call graph names symbols.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import pairwise

from pytest_negativa.gpucode.cubin import (
    CALL,
    PART_ADDRESS_TAKEN,
    PART_INDIRECT_CALLS,
    SHT_CUDA_CALLGRAPH,
    iter_call_graph,
    section_at,
    section_bytes,
    section_headers,
)
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    REL,
    RELA,
    SHDR,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHN_XINDEX,
    SHT_NOBITS,
    SHT_PROGBITS,
    SHT_REL,
    SHT_RELA,
    SHT_SYMTAB,
    SYM,
    Relocation,
    RowLayout,
    SectionHeader,
    string_at,
)
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting.layout import Edits, Fill, Patch

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


# "cuobjdump -elf" prints CUDA_INFO for .nv.info and .nv.info.NAME.
_SHT_CUDA_INFO = 0x70000000
# Types of the sections that belong to a function; they name its code section in sh_info.
_OWNED_TYPES = (SHT_PROGBITS, SHT_NOBITS, SHT_REL, SHT_RELA, _SHT_CUDA_INFO)
_CODE_PREFIX = b".text."
_STRING, _DOT = re.compile(rb"[^\0]+"), re.compile(rb"\.")
# Alignment of code sections in bytes, which is also the size of the smallest one.
_CODE_LEFT = 128


class CubinTables:
    """The tables of a cubin that functions are taken out of.

    Args:
        cubin: unpacked.
        sections: its section headers.

    Raises:
        PayloadError: a table leaves the cubin.
    """

    def __init__(self, cubin: bytes, sections: list[SectionHeader]) -> None:
        self._cubin = cubin
        self._sections = sections
        self._header = EHDR.unpack_from(cubin)
        self._names = self._section_names()

    def owned_by(self, code: Collection[int]) -> dict[int, int]:
        """The sections that belong to functions: code section by owned section, both by index.

        Both ``sh_info`` and the end of the name must say so.
        """
        owner = {index: index for index in code}
        # Twice, for relocations of a constant bank. Only crafted files go deeper.
        for _ in range(2):
            owner |= {
                index: owner[section.sh_info]
                for index, section in enumerate(self._sections)
                if index not in owner and self._is_for(index, section, owner)
            }
        return {index: of for index, of in owner.items() if index != of}

    def remove(self, code: Collection[int], owned: Collection[int]) -> Iterator[Patch]:
        """The patches of the tables that take functions out.

        Args:
            code: indices of the code sections of the functions.
            owned: indices of sections that belong to the functions, and nothing else refers to.

        Returns:
            Disjoint patches; none if the symbols have extended section indices (SHN_XINDEX).
        """
        symbols = [s for s in self._sections if s.sh_type == SHT_SYMTAB]
        symbol = (row for table in symbols for row in symbol_rows(self._cubin, table))
        if any(shndx == SHN_XINDEX for _, _, _, shndx, _, _ in symbol):
            return
        headers = [SHDR.pack(section) for section in self._sections]
        for index in owned:
            section = self._sections[index]
            if section.sh_type != SHT_NOBITS and section.sh_size:
                yield Patch(section.sh_offset, bytes(section.sh_size))
            # Of type SHT_NULL.
            headers[index] = bytes(SHDR.size)
        for table in symbols:
            if rows := b"".join(self._emptied_symbols(table, {*code}, {*owned})):
                yield Patch(table.sh_offset, rows)
        yield from self._empty_names(headers, {*code}, {*owned}, symbols)
        yield Patch(self._header.e_shoff, b"".join(headers))

    def _section_names(self) -> list[bytes]:
        table = section_at(self._cubin, self._sections, self._header.e_shstrndx, "section names")
        return [_name_at(table, section.sh_name) for section in self._sections]

    def _is_for(self, index: int, section: SectionHeader, owner: Mapping[int, int]) -> bool:
        """``.nv.info.NAME`` for ``.text.NAME``, ``.rel.nv.constant0.NAME`` for that without rel."""
        of = section.sh_info
        # Of code, sh_info is a symbol.
        is_code = section.sh_flags & SHF_EXECINSTR
        if section.sh_type not in _OWNED_TYPES or is_code or of not in owner:
            return False
        name = self._names[of]
        if owner[of] == of:
            name = b"." + name.removeprefix(_CODE_PREFIX)
        return len(name) > 1 and self._names[index].endswith(name)

    def _emptied_symbols(
        self, table: SectionHeader, code: set[int], owned: set[int]
    ) -> Iterator[bytes]:
        for name, info, other, shndx, value, size in symbol_rows(self._cubin, table):
            if shndx in code:
                yield SYM.struct.pack(0, info, other, shndx, 0, 0)
            elif shndx in owned:
                yield bytes(SYM.size)
            else:
                yield SYM.struct.pack(name, info, other, shndx, value, size)

    def _empty_names(
        self,
        headers: list[bytes],
        code: set[int],
        owned: set[int],
        symbols: Sequence[SectionHeader],
    ) -> Iterator[Patch]:
        """Zeros over the names of removed sections and symbols; one name for all cut sections."""
        gone = code | owned
        shstrndx = self._header.e_shstrndx
        kept: dict[int, set[int]] = defaultdict(set)
        names = {self._names[index] for index in gone}
        names |= {self._names[index][len(_CODE_PREFIX) :] for index in code}
        kept[shstrndx].update(s.sh_name for i, s in enumerate(self._sections) if i not in gone)
        for table in symbols:
            strings = section_at(self._cubin, self._sections, table.sh_link, "symbol names")
            for name, _, _, shndx, _, _ in symbol_rows(self._cubin, table):
                if shndx in gone:
                    names.add(_name_at(strings, name))
                else:
                    kept[table.sh_link].add(name)
        strings_used = set(self._strings_of_call_graphs())
        names.discard(b"")
        for index, offsets in kept.items():
            section = self._sections[index]
            strings = section_at(self._cubin, self._sections, index, "names")
            emptied = _without(strings, names, offsets | strings_used)
            if index == shstrndx:
                self._cut_code(headers, emptied, code)
            if emptied:
                yield Patch(section.sh_offset, bytes(emptied))

    def _strings_of_call_graphs(self) -> Iterator[int]:
        for section in self._sections:
            if section.sh_type == SHT_CUDA_CALLGRAPH:
                table = section_bytes(self._cubin, section, "call graph", CALL.size)
                for part, _function, prototype in iter_call_graph(table):
                    if part in (PART_ADDRESS_TAKEN, PART_INDIRECT_CALLS):
                        yield prototype

    def _cut_code(self, headers: list[bytes], names: bytearray, code: set[int]) -> None:
        """Cut the code sections, and give the same name to all that lost theirs."""
        common = None
        for index in sorted(code):
            section = self._sections[index]
            name = section.sh_name
            if self._names[index].startswith(_CODE_PREFIX) and not names[name]:
                if common is None:
                    # At the place of a longer name, which leaves the zero at the end.
                    common = name
                    names[name : name + len(_CODE_PREFIX)] = _CODE_PREFIX
                name = common
            size = min(section.sh_size, _CODE_LEFT)
            headers[index] = SHDR.pack(section._replace(sh_name=name, sh_size=size))


def symbol_rows(cubin: bytes, table: SectionHeader) -> Iterator[tuple[int, ...]]:
    """The fields of each symbol of a table: name, info, other, section, value, size.

    Raises:
        PayloadError: the table leaves the cubin, or ends within a symbol.
    """
    return SYM.struct.iter_unpack(section_bytes(cubin, table, "symbol table", SYM.size))


def _without(strings: bytes, names: Collection[bytes], kept: Collection[int]) -> bytearray:
    """A string table with zeros over ``names``, alone or at the end of a section's name.

    Args:
        strings: the table.
        names: what to overwrite.
        kept: offsets of strings that are needed; they may lie inside longer strings.
    """
    result = bytearray(strings)
    places = sorted(kept)
    for found in _STRING.finditer(strings):
        start, end = found.span()
        at = bisect_left(places, start)
        needed = at < len(places) and places[at] < end
        if not needed and _ends_with(found[0], names):
            result[start:end] = bytes(end - start)
    return result


def _ends_with(string: bytes, names: Collection[bytes]) -> bool:
    """Whether a string is one of ``names``, or a section's name that ends in one of them."""
    dots = _DOT.finditer(string, 1) if string.startswith(b".") else ()
    return string in names or any(string[dot.end() :] in names for dot in dots)


def _name_at(table: bytes, offset: int) -> bytes:
    name = string_at(table, offset)
    return table[offset:] if name is None else name
