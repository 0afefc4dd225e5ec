"""Takes functions whose code is overwritten out of the tables of an unpacked cubin.

Then nothing finds them by name: a lookup fails with CUDA_ERROR_NOT_FOUND, where the overwritten
code would be run otherwise; the device gets no memory for them; and their names, which are longer
than the code that a program uses, compress to nothing.

Every section and symbol keeps its index, and every byte that stays its offset. What the driver
takes, and what not, was tried with real cubins on an H200 with driver 580.159, lazy and eager:

- A section for a function, such as ``.nv.info.NAME``, may become SHT_NULL with its content zeros.
  With zeros and its type kept the cubin is refused (CUDA_ERROR_INVALID_IMAGE).
- A code section may be cut to its first 16 bytes, not to none, and may be called ``.text.``, as any
  number of them. Without a name, or as SHT_NULL, lazy loading refuses some cubins. It is the name
  of this section by which kernels are looked up, not that of the symbol.
- A symbol in a code section may lose name, value and size; without its section, the call
  graph, which names symbols, makes the driver fail (CUDA_ERROR_UNKNOWN).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_negativa.gpucode.cubin import section_bytes
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
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.rewriting.edits import Patch

# "cuobjdump -elf" prints CUDA_INFO for .nv.info and .nv.info.NAME, CUDA_CALLGRAPH for the other.
_SHT_CUDA_INFO = 0x70000000
_SHT_CUDA_CALLGRAPH = 0x70000001
# Of .nv.callgraph, see gpucode.cubin: rows (function, offset of a prototype in .strtab) follow.
_PARTS_WITH_STRINGS = (0xFFFFFFFE, 0xFFFFFFFD)
_PARTS = range(0xFFFFFFFC, 0x100000000)
_PAIR = struct.Struct("<II")
# What sections of a function are, all of which name its code section in sh_info.
_OWNED_TYPES = (SHT_PROGBITS, SHT_NOBITS, SHT_REL, SHT_RELA, _SHT_CUDA_INFO)
_CODE_PREFIX = b".text."
# What code sections are aligned to, and the least that one has.
_CODE_LEFT = 128


class CubinTables:
    """The tables of a cubin, for taking functions out of them.

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
        """The sections that there are for the functions of code sections: to whose, by index.

        Two witnesses: ``sh_info``, and the end of the name.
        """
        owner = {index: index for index in code}
        # Relocations of a constant bank: deeper it doesn't go, but in crafted files.
        for _ in range(2):
            owner |= {
                index: owner[section.sh_info]
                for index, section in enumerate(self._sections)
                if index not in owner and self._is_for(index, section, owner)
            }
        return {index: of for index, of in owner.items() if index != of}

    def remove(self, code: Collection[int], owned: Collection[int]) -> Iterator[Patch]:
        """What becomes of the tables when functions are taken out.

        Args:
            code: their code sections, whose content may be anything by now.
            owned: of the sections that there are for them, those to which nothing refers.

        Returns:
            Patches that are disjoint; none if symbols have section indices that don't fit.
        """
        symbols = [s for s in self._sections if s.sh_type == SHT_SYMTAB]
        if any(
            shndx == SHN_XINDEX for table in symbols for _, _, _, shndx, _, _ in self._rows(table)
        ):
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
        table = self._content(self._header.e_shstrndx, "section names")
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

    def _content(self, index: int, what: str) -> bytes:
        if index >= len(self._sections):
            raise PayloadError(f"cubin: no section {index} for {what}")
        return section_bytes(self._cubin, self._sections[index], what)

    def _rows(self, table: SectionHeader) -> Iterator[tuple[int, ...]]:
        rows = section_bytes(self._cubin, table, "symbol table")
        if len(rows) % SYM.size:
            raise PayloadError(f"cubin: symbol table of {len(rows)} bytes, expected whole entries")
        return SYM.struct.iter_unpack(rows)

    def _emptied_symbols(
        self, table: SectionHeader, code: set[int], owned: set[int]
    ) -> Iterator[bytes]:
        for name, info, other, shndx, value, size in self._rows(table):
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
        """Zeros over the names of what is gone, and one name for all code sections that are cut."""
        gone = code | owned
        shstrndx = self._header.e_shstrndx
        kept: dict[int, set[int]] = defaultdict(set)
        names = {self._names[index] for index in gone}
        names |= {self._names[index][len(_CODE_PREFIX) :] for index in code}
        kept[shstrndx].update(s.sh_name for i, s in enumerate(self._sections) if i not in gone)
        for table in symbols:
            strings = self._content(table.sh_link, "symbol names")
            for name, _, _, shndx, _, _ in self._rows(table):
                if shndx in gone:
                    names.add(_name_at(strings, name))
                else:
                    kept[table.sh_link].add(name)
        strings_used = set(self._strings_of_call_graphs())
        names.discard(b"")
        for index, offsets in kept.items():
            section = self._sections[index]
            emptied = _without(self._content(index, "names"), names, offsets | strings_used)
            if index == shstrndx:
                self._cut_code(headers, emptied, code)
            if emptied:
                yield Patch(section.sh_offset, bytes(emptied))

    def _strings_of_call_graphs(self) -> Iterator[int]:
        for section in self._sections:
            if section.sh_type == _SHT_CUDA_CALLGRAPH:
                part = 0
                rows = section_bytes(self._cubin, section, "call graph")
                for first, second in _PAIR.iter_unpack(
                    rows[: len(rows) // _PAIR.size * _PAIR.size]
                ):
                    if first == 0 and second in _PARTS:
                        part = second
                    elif part in _PARTS_WITH_STRINGS:
                        yield second

    def _cut_code(self, headers: list[bytes], names: bytearray, code: set[int]) -> None:
        """Cut the code sections, and give all whose name is gone the same one."""
        common = None
        for index in sorted(code):
            section = self._sections[index]
            name = section.sh_name
            if self._names[index].startswith(_CODE_PREFIX) and not names[name]:
                if common is None:
                    # Where a longer one has been; the zero after it is there.
                    common = name
                    names[name : name + len(_CODE_PREFIX)] = _CODE_PREFIX
                name = common
            size = min(section.sh_size, _CODE_LEFT)
            headers[index] = SHDR.pack(section._replace(sh_name=name, sh_size=size))


def _without(strings: bytes, names: Collection[bytes], kept: Collection[int]) -> bytearray:
    """A string table, with zeros over ``names``, alone or at the end of a section's name.

    Args:
        kept: offsets of strings that are needed; they may lie inside of longer ones.
    """
    result = bytearray(strings)
    ends = sorted(kept)
    position = 0
    at = 0
    while position < len(strings):
        end = strings.find(b"\0", position)
        end = len(strings) if end < 0 else end
        while at < len(ends) and ends[at] < position:
            at += 1
        needed = at < len(ends) and ends[at] < end
        if end > position and not needed and _ends_with(strings[position:end], names):
            result[position:end] = bytes(end - position)
        position = end + 1
    return result


def _ends_with(string: bytes, names: Collection[bytes]) -> bool:
    """Whether it is one of ``names``, or as a section is called: ``.nv.info.`` and one of them."""
    if string in names:
        return True
    at = 0
    while string.startswith(b".") and (at := string.find(b".", at + 1)) >= 0:
        if string[at + 1 :] in names:
            return True
    return False


def _name_at(table: bytes, offset: int) -> bytes:
    name = string_at(table, offset)
    return table[offset:] if name is None else name
