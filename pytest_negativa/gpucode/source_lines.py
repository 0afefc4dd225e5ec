"""The source line of each kernel, from cubins' line information (nvcc -lineinfo, DWARF).

``nvcc -lineinfo`` and ``nvcc -G`` write ``.debug_line``, a DWARF line program of version 2 with a
sequence for each function. The address of a sequence is 0, and a relocation names its function. So
this reads the relocations, and of each sequence only the first rows. pyelftools reads headers and
numbers. It finds line programs by ``.debug_info``, which ``-lineinfo`` doesn't write.

Sources: DWARF 4, section 6.2, for the header and the opcodes. For NVIDIA's own opcode, ``readelf
--debug-dump=rawline`` on cubins of nvcc 13.0.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import io
import os
import struct
from collections.abc import Iterator
from typing import Any

from elftools.common.exceptions import ELFParseError
from elftools.common.utils import struct_parse
from elftools.dwarf.structs import DWARFStructs

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import section_at, section_bytes, section_headers
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    REL,
    RELA,
    SHT_REL,
    SHT_RELA,
    STT_SECTION,
    SYM,
    SectionHeader,
    string_at,
)
from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Cubin, LibraryMap

_DEBUG_LINE = b".debug_line"
_TEXT = b".text."
_RELOCATIONS = {SHT_REL: REL, SHT_RELA: RELA}

_HEADER = struct.Struct("<IH4x")  # unit_length, version, header_length
_VERSIONS = (2, 3, 4)

_COPY, _ADVANCE_LINE, _SET_FILE = 1, 3, 4
_FIXED_ADVANCE_PC = 9
_END_SEQUENCE = 1
# DW_LNE_set_address before its operand: extended, 9 bytes long, opcode 2.
_SET_ADDRESS = b"\x00\x09\x02"
# Before rows of an inlined function; its first operand is 0 again behind them.
_INLINED_CALL = 0x90
# Of a sequence, to its first row: four opcodes, and five for each call that is inlined there.
_MOST_BYTES = 10_000
_MOST_LINES = 1 << 31
_DAMAGED = ELFParseError, IndexError, OverflowError, ZeroDivisionError
_STRUCTS = DWARFStructs(little_endian=True, dwarf_format=32, address_size=8)

SourceLine = tuple[str, int]
"""A source file, with its path as the compiler wrote it, and a line of it, from 1."""


def read_source_lines(library_map: LibraryMap) -> dict[str, SourceLine]:
    """Find the source lines of a library's kernels, by mangled name.

    Kernels without line information are left out, and so are damaged cubins.

    Args:
        library_map: of the library, whose cubins are read again.

    Raises:
        FormatError: the file can't be read, or changed since.
    """
    found: dict[str, SourceLine] = {}
    with ByteSource(library_map.library.path) as source:
        if (source.size, source.mtime_ns) != (
            library_map.library.size,
            library_map.library.mtime_ns,
        ):
            raise FormatError(source.path, None, "changed while it was read")
        for block in library_map.iter_code():
            if not isinstance(block.content, Cubin):
                continue
            kernels = {library_map.names[k.name] for k in block.content.kernels} - found.keys()
            if not kernels:
                continue
            payload = source.read(block.payload.start, block.stored_size)
            try:
                data = unpack(payload, block.compression, block.unpacked_size)
                lines = dict(iter_function_lines(data))
            except PayloadError:
                continue
            found |= {name: lines[name] for name in kernels & lines.keys()}
    return found


def iter_function_lines(data: bytes) -> Iterator[tuple[str, SourceLine]]:
    """The mangled name of each function of a cubin, and the line at which its code begins.

    Args:
        data: the cubin, unpacked.

    Raises:
        PayloadError: its tables leave the cubin.
    """
    if _DEBUG_LINE not in data:
        return  # as most cubins; their tables may have 100,000 sections
    sections = section_headers(data)
    shstrndx = EHDR.unpack_from(data).e_shstrndx
    names = section_at(data, sections, shstrndx, "section names")
    for index, section in enumerate(sections):
        if string_at(names, section.sh_name) != _DEBUG_LINE:
            continue
        program = section_bytes(data, section, "line information")
        units = (0, 0), *_iter_units(program)
        read_header = functools.cache(functools.partial(_read_header, program))
        for table in sections:
            if table.sh_info == index and table.sh_type in _RELOCATIONS:
                for offset, name in _iter_relocations(data, sections, table, names):
                    unit = bisect.bisect_right(units, (offset, len(program)))
                    with contextlib.suppress(*_DAMAGED):
                        start, end = units[unit - 1]
                        line = _line_at(program, read_header(start, end), offset, end)
                        if line is not None:
                            yield name.decode("ascii", "backslashreplace"), line


def _iter_relocations(
    data: bytes, sections: list[SectionHeader], table: SectionHeader, section_names: bytes
) -> Iterator[tuple[int, bytes]]:
    """The places in the line program that hold an address, with the name of the function."""
    layout = _RELOCATIONS[table.sh_type]
    rows = section_bytes(data, table, "relocations")
    symbols = section_at(data, sections, table.sh_link, "symbols")
    strings = section_at(data, sections, sections[table.sh_link].sh_link, "symbol names")
    for row in layout.iter_unpack(rows[: len(rows) // layout.size * layout.size]):
        if (row.symbol + 1) * SYM.size > len(symbols):
            continue
        symbol = SYM.unpack_from(symbols, row.symbol * SYM.size)
        name = string_at(strings, symbol.st_name)
        if symbol.type == STT_SECTION and symbol.st_shndx < len(sections):
            section = string_at(section_names, sections[symbol.st_shndx].sh_name) or b""
            name = section.removeprefix(_TEXT)
        if name:
            yield row.r_offset, name


def _iter_units(program: bytes) -> Iterator[tuple[int, int]]:
    """Where the line programs of compilation units begin and end, but for unknown versions."""
    start = 0
    while start + _HEADER.size <= len(program):
        length, version = _HEADER.unpack_from(program, start)
        end = start + 4 + length
        if end > len(program):
            return
        if version in _VERSIONS:
            yield start, end
        start = end


def _read_header(program: bytes, start: int, end: int) -> Any:
    """The header of a unit; None if it is damaged."""
    with contextlib.suppress(ELFParseError):
        return struct_parse(_STRUCTS.Dwarf_lineprog_header, io.BytesIO(program[start:end]))
    return None


def _line_at(program: bytes, header: Any, at: int, end: int) -> SourceLine | None:
    """The line of the sequence whose address is at an offset: of its first own row.

    Rows of inlined functions are not its own.

    Args:
        program: of all units.
        header: of the unit.
        end: of the unit.

    Raises:
        ELFParseError and others of ``_DAMAGED``: the program is damaged.
    """
    if header is None or program[max(at - len(_SET_ADDRESS), 0) : at] != _SET_ADDRESS:
        return None
    stream = io.BytesIO(program[at + 8 : min(at + 8 + _MOST_BYTES, end)])
    structs: Any = _STRUCTS
    file = line = 1
    inlined = 0
    while True:
        opcode = struct_parse(structs.the_Dwarf_uint8, stream)
        if opcode >= header.opcode_base:
            line += header.line_base + (opcode - header.opcode_base) % header.line_range
        elif opcode == 0:
            size = struct_parse(structs.the_Dwarf_uleb128, stream)
            end = stream.tell() + size
            kind = struct_parse(structs.the_Dwarf_uint8, stream)
            if kind == _END_SEQUENCE:
                return None
            if kind == _INLINED_CALL:
                inlined = struct_parse(structs.the_Dwarf_uleb128, stream)
            stream.seek(end)
            continue
        elif opcode == _ADVANCE_LINE:
            line += struct_parse(structs.the_Dwarf_sleb128, stream)
            continue
        elif opcode == _SET_FILE:
            file = struct_parse(structs.the_Dwarf_uleb128, stream)
            continue
        elif opcode == _FIXED_ADVANCE_PC:
            stream.seek(2, io.SEEK_CUR)
            continue
        elif opcode != _COPY:
            for _ in range(header.standard_opcode_lengths[opcode - 1]):
                struct_parse(structs.the_Dwarf_uleb128, stream)
            continue
        # A row.
        if not inlined and 0 < line < _MOST_LINES and file > 0:
            return _path(header, file), line


def _path(header: Any, number: int) -> str:
    file = header.file_entry[number - 1]
    folders = [b"", *header.include_directory]
    folder = folders[file.dir_index] if file.dir_index < len(folders) else b""
    return os.path.join(folder, file.name).decode("utf-8", "backslashreplace")
