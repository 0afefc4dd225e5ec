"""Cubin (device ELF) to kernels, device functions, data, call graph; ABI versions 7 and 8.

The tables are unpacked whole. pyelftools, which reads symbol by symbol, takes 30 times as long for
the 300,000 symbols of a ``libtorch_cuda.so``.

Sources: the ELF gABI for headers and symbols. For NVIDIA's own types, the output of
``cuobjdump -elf`` on this project's fixtures, named at each constant.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import compress

from pytest_negativa.arch import SmArch
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    EI_ABIVERSION,
    EI_CLASS,
    ELFCLASS64,
    EM_CUDA,
    ET_REL,
    SHDR,
    SHN_UNDEF,
    SHT_NOBITS,
    SHT_SYMTAB,
    STT_FUNC,
    STT_OBJECT,
    SYM,
    ElfHeader,
    SectionHeader,
)
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.library import Cubin, Edge, Function

CALL = struct.Struct("<II")
"""A row of .nv.callgraph."""
# Of a section header: its name, type and offset; and where the type lies.
_PLACE = struct.Struct("<II16xQ")
_SH_TYPE = 4

# e_ident[EI_ABIVERSION]: 7 up to ptxas 12, then 8. Under another version e_flags and the tables
# may have other meanings.
_ABI_VERSIONS = (7, 8)

# "cuobjdump -elf" prints CUDA_OBJECT: data of a relocatable cubin.
_STT_CUDA_OBJECT = 13
_NAMED_SYMBOLS = frozenset({STT_OBJECT, STT_FUNC, _STT_CUDA_OBJECT})
_ST_INFO = 4  # offset in a row
_IS_NAMED = bytes(st_info & 0xF in _NAMED_SYMBOLS for st_info in range(256))
# "cuobjdump -elf" prints STO_ENTRY for kernels: bit 4 of st_other.
_STO_CUDA_ENTRY = 0x10
SHT_CUDA_CALLGRAPH = 0x70000001
"""Type of .nv.callgraph, as "cuobjdump -elf" prints it."""
# .nv.callgraph is a table of pairs in four parts; a row (0, marker) opens each. The meaning of the
# parts was found by compiling functions that call in each way: tests/fixtures/src/callgraph.cu.
_PART_CALLS = 0xFFFFFFFF  # (caller, callee)
PART_ADDRESS_TAKEN = 0xFFFFFFFE  # (function, prototype)
PART_INDIRECT_CALLS = 0xFFFFFFFD  # (caller, prototype)
_PART_REFERENCES = 0xFFFFFFFC  # (function, function whose address it takes, or that it launches)
_PARTS = range(_PART_REFERENCES, _PART_CALLS + 1)


def is_cubin_header(data: bytes) -> bool:
    """Whether ``data`` (the first 20 bytes or more) starts a cubin."""
    return (
        len(data) >= 20
        and data[:4] == ELF_MAGIC
        and data[EI_CLASS] == ELFCLASS64
        and int.from_bytes(data[18:20], "little") == EM_CUDA
    )


def abi_problem(header: bytes) -> str | None:
    """Reason against reading a cubin's tables, by its first 64 bytes; None if there is none."""
    version = header[EI_ABIVERSION]
    return None if version in _ABI_VERSIONS else f"cubin: ABI version {version}, expected 7 or 8"


def cubin_arch(header: bytes) -> SmArch:
    """The SM arch in an ELF header (its first 64 bytes).

    From ABI version 8 on, the number is in bits 8 to 15 of ``e_flags`` (0x6006402: sm_100), before
    in bits 0 to 7 (0x5a055a: sm_90). Suffix ``a`` is bit 11 before ABI 8 (0x5a0d5a: sm_90a). In
    ABI 8, ptxas 12 sets bit 3 for it, and ptxas 13 states it in ``.nv.compat`` alone. No version
    states ``f``. So a cubin without a suffix here may still have one; the header of a fatbin
    element always states it. Source: cubins of ptxas 12.8 and 13.0 for all archs.
    """
    fields = EHDR.unpack_from(header)
    flags = fields.e_flags
    if fields.e_ident[EI_ABIVERSION] >= 8:
        return SmArch.from_number(flags >> 8 & 0xFF, "a" if flags & 0x8 else "")
    return SmArch.from_number(flags & 0xFF, "a" if flags & 0x800 else "")


def parse_cubin(
    data: bytes, names: NameTable, *, digest: bool = False, calls: bool = True
) -> Cubin:
    """Read the tables of a cubin.

    Args:
        data: the cubin, unpacked.
        names: gets the names.
        calls: whether to read call graphs.
        digest: whether to add the SHA-256 of ``data``.

    Raises:
        PayloadError: not a cubin, or a table leaves it.
    """
    header = _read_header(data)
    if problem := abi_problem(data):
        raise PayloadError(problem)
    tables = _Tables(data, names)
    tables.read_symbols(header.e_shstrndx)
    if calls:
        tables.read_call_graphs()
    return Cubin(
        arch=cubin_arch(data),
        relocatable=header.e_type == ET_REL,
        kernels=tuple(tables.kernels),
        device_functions=tuple(tables.device_functions),
        externals=tuple(tables.externals),
        data=tuple(tables.data),
        calls=tuple(tables.edges[_PART_CALLS]),
        references=tuple(tables.edges[_PART_REFERENCES]),
        address_taken=tuple(tables.edges[PART_ADDRESS_TAKEN]),
        indirect_calls=tuple(tables.edges[PART_INDIRECT_CALLS]),
        sha256=hashlib.sha256(data).hexdigest() if digest else None,
    )


def section_headers(data: bytes) -> list[SectionHeader]:
    """Read the section headers of a cubin.

    Raises:
        PayloadError: not a cubin, or they leave it.
    """
    return list(SHDR.iter_unpack(_section_table(data)))


def _read_header(data: bytes) -> ElfHeader:
    if not is_cubin_header(data) or len(data) < EHDR.size:
        raise PayloadError(f"not a cubin: starts with {data[:20].hex()}")
    return EHDR.unpack_from(data)


def _section_table(data: bytes) -> bytes:
    header = _read_header(data)
    if header.e_shentsize != SHDR.size:
        raise PayloadError(f"cubin: e_shentsize {header.e_shentsize}, expected {SHDR.size}")
    start, end = header.e_shoff, header.e_shoff + header.e_shentsize * header.e_shnum
    if end > len(data):
        raise PayloadError(f"cubin: section headers end at {end:#x}, the cubin at {len(data):#x}")
    return data[start:end]


def section_bytes(data: bytes, section: SectionHeader, what: str, row_size: int = 1) -> bytes:
    """Read the content of a section.

    Args:
        what: the word for it in messages.
        row_size: of a table, bytes of a row.

    Raises:
        PayloadError: the section has no content or no whole rows, or leaves the cubin.
    """
    start, end = section.sh_offset, section.file_end
    if section.sh_type == SHT_NOBITS or end > len(data):
        raise PayloadError(
            f"cubin: {what} at {start:#x} to {end:#x}, the cubin ends at {len(data):#x}"
        )
    if section.sh_size % row_size:
        raise PayloadError(f"cubin: {what} of {section.sh_size} bytes, expected whole entries")
    return data[start:end]


def section_at(data: bytes, sections: Sequence[SectionHeader], index: int, what: str) -> bytes:
    """Read the content of the section of an index, see ``section_bytes``.

    Raises:
        PayloadError: see there; or there is no such section.
    """
    if index >= len(sections):
        raise PayloadError(f"cubin: no section {index} for {what}")
    return section_bytes(data, sections[index], what)


def iter_call_graph(table: bytes) -> Iterator[tuple[int | None, int, int]]:
    """Read the pairs of a call graph, each with the part that it belongs to."""
    part = None
    for first, second in CALL.iter_unpack(table):
        if first == 0 and second in _PARTS:
            part = second
        else:
            yield part, first, second


class _Tables:
    """Collects the rows of one cubin while its tables are read."""

    def __init__(self, data: bytes, names: NameTable) -> None:
        self._data = data
        self._section_table = table = _section_table(data)
        self._count = len(table) // SHDR.size
        fields = memoryview(table).cast("I")
        self._types = fields[_SH_TYPE // 4 :: SHDR.size // 4].tolist()
        self._names = names
        self.kernels: list[Function] = []
        self.device_functions: list[Function] = []
        self.externals: list[int] = []
        self.data: list[int] = []
        self.edges: dict[int, list[Edge]] = {part: [] for part in _PARTS}
        self._symbols = b""
        self._strings = b""
        self._index_at: dict[int, int] = {}
        self._name_of: dict[int, int] = {}

    def _section(self, index: int, what: str) -> SectionHeader:
        if index >= self._count:
            raise PayloadError(f"cubin: no section {index} for {what}")
        return SHDR.unpack_from(self._section_table, index * SHDR.size)

    def _content(self, index: int, what: str) -> bytes:
        return section_bytes(self._data, self._section(index, what), what)

    def read_symbols(self, shstrndx: int) -> None:
        table, count, size = self._section_table, self._count, len(self._data)
        section_names = self._content(shstrndx, "section names")
        # From sm_100 on there is a second table, .nv.merc.symtab, with the same names.
        for index in self._sections_of(SHT_SYMTAB):
            symtab = self._section(index, "symbol table")
            if section_names.startswith(b".symtab\0", symtab.sh_name):
                break
        else:
            raise PayloadError("cubin: has no symbol table, so its functions are not known")
        self._strings = strings = self._content(symtab.sh_link, "symbol names")
        self._symbols = section_bytes(self._data, symtab, "symbol table", SYM.size)
        self._names.reserve_rows(len(self._symbols) // SYM.size)
        self._index_at = index_at = self._names.indices_in(strings)
        name_at, symbols = self._string, self._symbols
        unpack_symbol, unpack_place = SYM.struct.unpack_from, _PLACE.unpack_from
        # Most symbols are sections.
        named = symbols[_ST_INFO :: SYM.size].translate(_IS_NAMED)
        for at in compress(range(0, len(symbols), SYM.size), named):
            st_name, st_info, st_other, st_shndx, st_value, st_size = unpack_symbol(symbols, at)
            kind = st_info & 0xF
            name = index_at.get(st_name)
            if name is None:
                name = name_at(st_name, "symbol name")
            if st_shndx == SHN_UNDEF:
                if kind == STT_FUNC:
                    self.externals.append(name)
                continue
            if st_shndx >= count:
                raise PayloadError(f"cubin: symbol in section {st_shndx} of {count}")
            sh_name, sh_type, sh_offset = unpack_place(table, st_shndx * SHDR.size)
            if kind == STT_FUNC:
                offset = sh_offset + st_value
                if sh_type == SHT_NOBITS or offset + st_size > size:
                    raise PayloadError(
                        f"cubin: code at {offset:#x} to {offset + st_size:#x}, the cubin ends at "
                        f"{size:#x}"
                    )
                # slim took the function out of the tables, see rewriting.cubin_code: neither
                # the driver nor a reader finds it. The call graph may still name it.
                if not strings[st_name]:
                    continue
                function = Function(name, offset, st_size)
                if st_other & _STO_CUDA_ENTRY:
                    self.kernels.append(function)
                else:
                    self.device_functions.append(function)
                continue
            if section_names.startswith((b".nv.global", b".nv.constant"), sh_name):
                self.data.append(name)

    def _sections_of(self, sh_type: int) -> Iterator[int]:
        """The sections of a type. To unpack all 140,000 of libcublas.so would take long."""
        index = -1
        for _ in range(self._types.count(sh_type)):
            index = self._types.index(sh_type, index + 1)
            yield index

    def read_call_graphs(self) -> None:
        for index in self._sections_of(SHT_CUDA_CALLGRAPH):
            section = self._section(index, "call graph")
            self._read_call_graph(section_bytes(self._data, section, "call graph", CALL.size))

    def _read_call_graph(self, table: bytes) -> None:
        self._names.reserve_rows(len(table) // CALL.size)
        symbol = self._symbol
        for part, first, second in iter_call_graph(table):
            if part is None:
                # A wrong guess could make a function unreachable that is not.
                raise PayloadError(
                    f"cubin: call graph row ({first:#x}, {second:#x}) belongs to no known part"
                )
            name = symbol(first)
            has_prototype = part in (PART_ADDRESS_TAKEN, PART_INDIRECT_CALLS)
            target = self._string(second, "prototype") if has_prototype else symbol(second)
            self.edges[part].append((name, target))

    def _symbol(self, index: int) -> int:
        # A function is in many rows.
        name = self._name_of.get(index)
        if name is not None:
            return name
        count = len(self._symbols) // SYM.size
        if index < count:
            symbol = SYM.unpack_from(self._symbols, index * SYM.size)
            if symbol.type in _NAMED_SYMBOLS:
                name = self._name_of[index] = self._string(symbol.st_name, "symbol name")
                return name
        raise PayloadError(
            f"cubin: call graph names symbol {index}, which is no function of the {count} symbols"
        )

    def _string(self, offset: int, what: str) -> int:
        index = self._index_at.get(offset)
        if index is None:
            end = self._strings.find(b"\0", offset)
            if end < 0:
                raise PayloadError(f"cubin: {what} at {offset:#x} has no end")
            index = self._index_at[offset] = self._names.index(self._strings[offset:end])
        return index
