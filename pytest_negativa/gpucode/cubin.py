"""Cubin (device ELF) bytes to a ``Cubin``: kernels, device functions, data, call graph.

With ``struct`` over whole tables, not symbol by symbol through pyelftools, which takes 30
times as long for the 300,000 symbols of a ``libtorch_cuda.so``.

Where the facts come from: the ELF gABI for headers and symbols; for what is NVIDIA's own,
the output of ``cuobjdump -elf`` on this project's fixtures, named at each constant.
"""

from __future__ import annotations

import hashlib
import struct

from pytest_negativa.arch import SmArch
from pytest_negativa.gpucode.elf import ELF_HEADER, ELF_MAGIC, EM_CUDA
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.models.library import Call, Cubin, DataSymbol, Function, Signature

# gABI: sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info,
# sh_addralign, sh_entsize.
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
# gABI: st_name, st_info, st_other, st_shndx, st_value, st_size.
SYMBOL = struct.Struct("<IBBHQQ")
_CALL = struct.Struct("<II")

# Of the ABI in e_ident[8]: 7 up to ptxas 12, and 8. In another one e_flags and the tables may say
# other things.
_ABI_VERSIONS = (7, 8)

_ET_REL = 1
_SHT_SYMTAB = 2
_SHT_NOBITS = 8
_STT_OBJECT = 1
_STT_FUNC = 2
# "cuobjdump -elf" prints CUDA_OBJECT: data of a relocatable cubin.
_STT_CUDA_OBJECT = 13
_NAMED_SYMBOLS = frozenset({_STT_OBJECT, _STT_FUNC, _STT_CUDA_OBJECT})
# "cuobjdump -elf" prints STO_ENTRY for kernels: bit 4 of st_other.
_STO_CUDA_ENTRY = 0x10
# "cuobjdump -elf" prints the type CUDA_CALLGRAPH for .nv.callgraph.
_SHT_CUDA_CALLGRAPH = 0x70000001
# .nv.callgraph is a table of pairs in four parts; a row (0, marker) opens each. What
# the parts mean was found by compiling functions that call in each way, see
# tests/fixtures/src/callgraph.cu.
_PART_CALLS = 0xFFFFFFFF  # (caller, callee)
_PART_ADDRESS_TAKEN = 0xFFFFFFFE  # (function, prototype)
_PART_INDIRECT_CALLS = 0xFFFFFFFD  # (caller, prototype)
_PART_REFERENCES = 0xFFFFFFFC  # (function, function whose address it takes, or that it launches)
_PARTS = range(_PART_REFERENCES, _PART_CALLS + 1)

Sections = list[tuple[int, int, int, int, int, int, int, int, int, int]]
"""Section headers of a cubin, each with the fields of the gABI, in their order."""


def is_cubin_header(data: bytes) -> bool:
    """Whether ``data`` (the first 20 bytes or more) starts a cubin."""
    return (
        len(data) >= 20
        and data[:4] == ELF_MAGIC
        and data[4] == 2
        and int.from_bytes(data[18:20], "little") == EM_CUDA
    )


def abi_problem(header: bytes) -> str | None:
    """Why the header (its first 64 bytes) of a cubin can't be trusted, or None."""
    if header[8] in _ABI_VERSIONS:
        return None
    return f"cubin: ABI version {header[8]}, expected 7 or 8"


def cubin_arch(header: bytes) -> SmArch:
    """The SM arch in an ELF header (its first 64 bytes).

    From ABI version 8 on the number is in bits 8 to 15 of ``e_flags`` (0x6006402: sm_100), before
    in bits 0 to 7 (0x5a055a: sm_90). Suffix ``a`` is bit 11 before ABI 8 (0x5a0d5a: sm_90a) and
    bit 3 in ABI 8 as ptxas 12 writes it; ptxas 13 leaves it to ``.nv.compat``, and none of them
    tells ``f``. So a cubin that states no suffix may still have one; the header of a fatbin
    element always states it. Read off cubins of ptxas 12.8 and 13.0 for all archs.
    """
    fields = ELF_HEADER.unpack(header[: ELF_HEADER.size])
    abi_version, flags = fields[0][8], fields[7]
    if abi_version >= 8:
        return SmArch.from_number(flags >> 8 & 0xFF, "a" if flags & 0x8 else "")
    return SmArch.from_number(flags & 0xFF, "a" if flags & 0x800 else "")


def parse_cubin(data: bytes, names: NameTable, *, digest: bool = False) -> Cubin:
    """Read the tables of a cubin; add the names to ``names``.

    Raises:
        PayloadError: not a cubin, or a table leaves it.
    """
    if not is_cubin_header(data) or len(data) < ELF_HEADER.size:
        raise PayloadError(f"not a cubin: starts with {data[:20].hex()}")
    if problem := abi_problem(data):
        raise PayloadError(problem)
    header = ELF_HEADER.unpack_from(data)
    sections = section_headers(data, header[6], header[11], header[12])
    tables = _Tables(names)
    tables.read_symbols(data, sections, header[13])
    for section in sections:
        if section[1] == _SHT_CUDA_CALLGRAPH:
            tables.read_call_graph(section_bytes(data, section, "call graph"))
    return Cubin(
        arch=cubin_arch(data),
        relocatable=header[1] == _ET_REL,
        kernels=tuple(tables.kernels),
        device_functions=tuple(tables.device_functions),
        externals=tuple(tables.externals),
        global_data=tuple(tables.global_data),
        constant_data=tuple(tables.constant_data),
        calls=tuple(tables.calls),
        references=tuple(tables.references),
        address_taken=tuple(tables.address_taken),
        indirect_calls=tuple(tables.indirect_calls),
        sha256=hashlib.sha256(data).hexdigest() if digest else None,
    )


def section_headers(data: bytes, offset: int, entry_size: int, count: int) -> Sections:
    """The section headers of a cubin; ``offset`` and so on as in its ELF header.

    Raises:
        PayloadError: they leave the cubin.
    """
    if entry_size != SECTION_HEADER.size:
        raise PayloadError(f"cubin: e_shentsize {entry_size}, expected {SECTION_HEADER.size}")
    end = offset + entry_size * count
    if end > len(data):
        raise PayloadError(f"cubin: section headers end at {end:#x}, the cubin at {len(data):#x}")
    return list(SECTION_HEADER.iter_unpack(data[offset:end]))


def section_bytes(data: bytes, section: tuple[int, ...], what: str) -> bytes:
    """The content of a section; ``what`` is the word for it in messages.

    Raises:
        PayloadError: it has none, or leaves the cubin.
    """
    kind, offset, size = section[1], section[4], section[5]
    if kind == _SHT_NOBITS or offset + size > len(data):
        raise PayloadError(
            f"cubin: {what} at {offset:#x} to {offset + size:#x}, the cubin ends at {len(data):#x}"
        )
    return data[offset : offset + size]


class _Tables:
    """Collects the rows of one cubin while its tables are read."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._symbol_names: list[int | None] = []
        self.kernels: list[Function] = []
        self.device_functions: list[Function] = []
        self.externals: list[int] = []
        self.global_data: list[DataSymbol] = []
        self.constant_data: list[DataSymbol] = []
        self.calls: list[Call] = []
        self.references: list[Call] = []
        self.address_taken: list[Signature] = []
        self.indirect_calls: list[Signature] = []
        self._strings = b""
        # A million symbols may share one name of a megabyte: it is looked at once.
        self._index_at: dict[int, int] = {}

    def read_symbols(self, data: bytes, sections: Sections, shstrndx: int) -> None:
        if shstrndx >= len(sections):
            raise PayloadError(f"cubin: no section {shstrndx} for section names")
        section_names = section_bytes(data, sections[shstrndx], "section names")
        # From sm_100 on there is a second table, .nv.merc.symtab, with the same names.
        symtab = next(
            (
                s
                for s in sections
                if s[1] == _SHT_SYMTAB and section_names.startswith(b".symtab\0", s[0])
            ),
            None,
        )
        if symtab is None:
            raise PayloadError("cubin: has no symbol table, so what it holds is not known")
        if symtab[6] >= len(sections):
            raise PayloadError(f"cubin: no section {symtab[6]} for symbol names")
        self._strings = section_bytes(data, sections[symtab[6]], "symbol names")
        table = section_bytes(data, symtab, "symbol table")
        if len(table) % SYMBOL.size:
            raise PayloadError(f"cubin: symbol table of {len(table)} bytes, expected whole entries")
        self._names.reserve_rows(len(table) // SYMBOL.size)
        symbol_names = self._symbol_names
        for st_name, st_info, st_other, st_shndx, st_value, st_size in SYMBOL.iter_unpack(table):
            kind = st_info & 0xF
            if kind not in _NAMED_SYMBOLS:
                symbol_names.append(None)
                continue
            name = self._string(st_name, "symbol name")
            symbol_names.append(name)
            if st_shndx == 0:
                if kind == _STT_FUNC:
                    self.externals.append(name)
                continue
            if st_shndx >= len(sections):
                raise PayloadError(f"cubin: symbol in section {st_shndx} of {len(sections)}")
            section = sections[st_shndx]
            if kind == _STT_FUNC:
                offset = section[4] + st_value
                if section[1] == _SHT_NOBITS or offset + st_size > len(data):
                    raise PayloadError(
                        f"cubin: code at {offset:#x} to {offset + st_size:#x}, the cubin ends at "
                        f"{len(data):#x}"
                    )
                # Nothing finds it, neither the driver nor a reader: taken out of the tables, see
                # rewriting.cubin_tables. The call graph may still name it.
                if not self._strings[st_name]:
                    self._names.nameless[bool(st_other & _STO_CUDA_ENTRY)] += 1
                    continue
                function = Function(name, offset, st_size)
                if st_other & _STO_CUDA_ENTRY:
                    self.kernels.append(function)
                else:
                    self.device_functions.append(function)
            elif section_names.startswith(b".nv.global", section[0]):
                self.global_data.append(DataSymbol(name, st_size))
            elif section_names.startswith(b".nv.constant", section[0]):
                self.constant_data.append(DataSymbol(name, st_size))

    def read_call_graph(self, table: bytes) -> None:
        if len(table) % _CALL.size:
            raise PayloadError(f"cubin: call graph of {len(table)} bytes, expected whole pairs")
        self._names.reserve_rows(len(table) // _CALL.size)
        part = None
        for first, second in _CALL.iter_unpack(table):
            if first == 0 and second in _PARTS:
                part = second
            elif part == _PART_CALLS:
                self.calls.append(Call(self._symbol(first), self._symbol(second)))
            elif part == _PART_REFERENCES:
                self.references.append(Call(self._symbol(first), self._symbol(second)))
            elif part == _PART_ADDRESS_TAKEN:
                self.address_taken.append(
                    Signature(self._symbol(first), self._string(second, "prototype"))
                )
            elif part == _PART_INDIRECT_CALLS:
                self.indirect_calls.append(
                    Signature(self._symbol(first), self._string(second, "prototype"))
                )
            else:
                # Guessing here could call a function unreachable that isn't.
                raise PayloadError(
                    f"cubin: call graph row ({first:#x}, {second:#x}) belongs to no known part"
                )

    def _symbol(self, index: int) -> int:
        if index >= len(self._symbol_names) or (name := self._symbol_names[index]) is None:
            raise PayloadError(
                f"cubin: call graph names symbol {index}, which is no function of the "
                f"{len(self._symbol_names)} symbols"
            )
        return name

    def _string(self, offset: int, what: str) -> int:
        index = self._index_at.get(offset)
        if index is None:
            end = self._strings.find(b"\0", offset)
            if end < 0:
                raise PayloadError(f"cubin: {what} at {offset:#x} has no end")
            index = self._index_at[offset] = self._names.index(self._strings[offset:end])
        return index
