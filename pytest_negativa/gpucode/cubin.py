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
from pytest_negativa.models.library import Call, Cubin, DataSymbol, Function

# gABI: sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info,
# sh_addralign, sh_entsize.
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
# gABI: st_name, st_info, st_other, st_shndx, st_value, st_size.
_SYMBOL = struct.Struct("<IBBHQQ")
_CALL = struct.Struct("<II")

_ET_REL = 1
_SHT_SYMTAB = 2
_SHT_NOBITS = 8
_STT_OBJECT = 1
_STT_FUNC = 2
# "cuobjdump -elf" prints STO_ENTRY for kernels: bit 4 of st_other.
_STO_CUDA_ENTRY = 0x10
# "cuobjdump -elf" prints the type CUDA_CALLGRAPH for .nv.callgraph.
_SHT_CUDA_CALLGRAPH = 0x70000001
# Callees from here up are no symbols: the callee is unknown until run or link time.
_FIRST_SPECIAL_CALLEE = 0xFFFFFFF0

_Sections = list[tuple[int, int, int, int, int, int, int, int, int, int]]


def is_cubin_header(data: bytes) -> bool:
    """Whether ``data`` (the first 20 bytes or more) starts a cubin."""
    return (
        len(data) >= 20
        and data[:4] == ELF_MAGIC
        and data[4] == 2
        and int.from_bytes(data[18:20], "little") == EM_CUDA
    )


def cubin_arch(header: bytes) -> SmArch:
    """The SM arch in an ELF header (its first 64 bytes).

    The number is in bits 8 to 15 of ``e_flags`` from ABI version 8 on (0x6006402: sm_100) and
    in bits 0 to 7 before (0x5a055a: sm_90), compared over all elements of the PyTorch 2.11
    stack with the arch that their fatbin header states. ``e_flags`` has no suffix for sm_90a:
    see ``_suffix``.
    """
    fields = ELF_HEADER.unpack(header[: ELF_HEADER.size])
    abi_version, flags = fields[0][8], fields[7]
    number = flags >> 8 & 0xFF if abi_version >= 8 else flags & 0xFF
    return SmArch.from_number(number)


def parse_cubin(data: bytes, names: NameTable, *, digest: bool = False) -> Cubin:
    """Read the tables of a cubin; add the names to ``names``.

    Raises:
        PayloadError: not a cubin, or a table leaves it.
    """
    if not is_cubin_header(data) or len(data) < ELF_HEADER.size:
        raise PayloadError(f"not a cubin: starts with {data[:20].hex()}")
    header = ELF_HEADER.unpack_from(data)
    sections = _section_headers(data, header[6], header[11], header[12])
    tables = _Tables(names)
    for section in sections:
        if section[1] == _SHT_SYMTAB:
            tables.read_symbols(data, sections, section, header[13])
            break
    for section in sections:
        if section[1] == _SHT_CUDA_CALLGRAPH:
            tables.read_calls(_section_bytes(data, section, "call graph"))
    return Cubin(
        arch=cubin_arch(data),
        relocatable=header[1] == _ET_REL,
        kernels=tuple(tables.kernels),
        device_functions=tuple(tables.device_functions),
        externals=tuple(tables.externals),
        global_data=tuple(tables.global_data),
        constant_data=tuple(tables.constant_data),
        calls=tuple(tables.calls),
        sha256=hashlib.sha256(data).hexdigest() if digest else None,
    )


def _section_headers(data: bytes, offset: int, entry_size: int, count: int) -> _Sections:
    if count == 0:
        return []
    if entry_size != _SECTION_HEADER.size:
        raise PayloadError(f"cubin: e_shentsize {entry_size}, expected {_SECTION_HEADER.size}")
    end = offset + entry_size * count
    if end > len(data):
        raise PayloadError(f"cubin: section headers end at {end:#x}, the cubin at {len(data):#x}")
    return list(_SECTION_HEADER.iter_unpack(data[offset:end]))


def _section_bytes(data: bytes, section: tuple[int, ...], what: str) -> bytes:
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

    def read_symbols(
        self, data: bytes, sections: _Sections, symtab: tuple[int, ...], shstrndx: int
    ) -> None:
        if symtab[6] >= len(sections) or shstrndx >= len(sections):
            raise PayloadError(f"cubin: no string table {symtab[6]} or {shstrndx}")
        strings = _section_bytes(data, sections[symtab[6]], "symbol names")
        section_names = _section_bytes(data, sections[shstrndx], "section names")
        table = _section_bytes(data, symtab, "symbol table")
        if len(table) % _SYMBOL.size:
            raise PayloadError(f"cubin: symbol table of {len(table)} bytes, expected whole entries")
        index = self._names.index
        symbol_names = self._symbol_names
        for st_name, st_info, st_other, st_shndx, st_value, st_size in _SYMBOL.iter_unpack(table):
            kind = st_info & 0xF
            if kind not in (_STT_FUNC, _STT_OBJECT):
                symbol_names.append(None)
                continue
            end = strings.find(b"\0", st_name)
            if end < 0:
                raise PayloadError(f"cubin: symbol name at {st_name:#x} has no end")
            name = index(strings[st_name:end])
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
                function = Function(name, offset, st_size)
                if st_other & _STO_CUDA_ENTRY:
                    self.kernels.append(function)
                else:
                    self.device_functions.append(function)
            elif section_names.startswith(b".nv.global", section[0]):
                self.global_data.append(DataSymbol(name, st_size))
            elif section_names.startswith(b".nv.constant", section[0]):
                self.constant_data.append(DataSymbol(name, st_size))

    def read_calls(self, table: bytes) -> None:
        symbol_names = self._symbol_names
        if len(table) % _CALL.size:
            raise PayloadError(f"cubin: call graph of {len(table)} bytes, expected whole pairs")
        for caller, callee in _CALL.iter_unpack(table):
            # Every cubin opens its table with (0, 0xffffffff) to (0, 0xfffffffc): symbol 0 is
            # no function, so these say nothing of one.
            if caller == 0:
                continue
            if caller >= len(symbol_names):
                raise PayloadError(
                    f"cubin: call graph names symbol {caller} of {len(symbol_names)}"
                )
            caller_name = symbol_names[caller]
            if callee >= _FIRST_SPECIAL_CALLEE:
                callee_name = None
            elif callee >= len(symbol_names):
                raise PayloadError(
                    f"cubin: call graph names symbol {callee} of {len(symbol_names)}"
                )
            else:
                callee_name = symbol_names[callee]
            if caller_name is not None:
                self.calls.append(Call(caller_name, callee_name))
