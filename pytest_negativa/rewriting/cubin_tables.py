"""Takes functions whose code is overwritten out of the tables of an unpacked cubin.

A lookup of such a function then fails with CUDA_ERROR_NOT_FOUND instead of running overwritten
code. The driver allocates no device memory for it, and its name compresses to nothing.

Every section and symbol keeps its index, and every byte that stays keeps its offset. The rules were
tried with real cubins on an H200 with driver 580.159, lazy and eager:

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
from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_negativa.gpucode.cubin import (
    CALL,
    PART_ADDRESS_TAKEN,
    PART_INDIRECT_CALLS,
    SHT_CUDA_CALLGRAPH,
    iter_call_graph,
    section_at,
    section_bytes,
)
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    SHDR,
    SHF_EXECINSTR,
    SHN_XINDEX,
    SHT_NOBITS,
    SHT_PROGBITS,
    SHT_REL,
    SHT_RELA,
    SHT_SYMTAB,
    SYM,
    SectionHeader,
    string_at,
)
from pytest_negativa.rewriting.edits import Patch

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
