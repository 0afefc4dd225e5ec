"""Line information of cubins to the source line at which each kernel begins.

``nvcc -lineinfo`` and ``nvcc -G`` write ``.debug_line``, a DWARF line program of version 2 with a
sequence for each function. The address of a sequence is 0, and a relocation names its function. So
this reads the relocations, and of each sequence only the first rows. pyelftools finds line programs
by ``.debug_info``, which ``-lineinfo`` doesn't write, and has no relocations for cubins.

Sources: DWARF 4, section 6.2, for the header and the opcodes. For NVIDIA's own opcode, ``readelf
--debug-dump=rawline`` on cubins of nvcc 13.0.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import is_cubin_header, section_bytes, section_headers
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

_HEADER = struct.Struct("<IHI")  # unit_length, version, header_length
_VERSIONS = (2, 3, 4)

_COPY, _ADVANCE_LINE, _SET_FILE = 1, 3, 4
_FIXED_ADVANCE_PC = 9
_END_SEQUENCE = 1
# DW_LNE_set_address before its operand: extended, 9 bytes long, opcode 2.
_SET_ADDRESS = b"\x00\x09\x02"
# Before rows of an inlined function; its first operand is 0 again behind them.
_INLINED_CALL = 0x90
# Sequences begin with four opcodes; each call that is inlined at the very start adds five.
_MOST_OPCODES = 1000
_MOST_LEB_BYTES = 10  # of 64 bits


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
    if not is_cubin_header(data) or len(data) < EHDR.size:
        raise PayloadError(f"not a cubin: starts with {data[:20].hex()}")
    if _DEBUG_LINE not in data:
        return  # as most cubins; their tables may have 100,000 sections
    sections = section_headers(data)
    shstrndx = EHDR.unpack_from(data).e_shstrndx
    names = _content(data, sections, shstrndx)
    for index, section in enumerate(sections):
        if string_at(names, section.sh_name) != _DEBUG_LINE:
            continue
        program = section_bytes(data, section, "line information")
        units = tuple(_iter_units(program))
        for table in sections:
            if table.sh_info == index and table.sh_type in _RELOCATIONS:
                for offset, name in _iter_relocations(data, sections, table, names):
                    unit = bisect.bisect_right(units, offset, key=lambda unit: unit.start)
                    line = units[unit - 1].line_at(offset) if unit else None
                    if line is not None:
                        yield name.decode("ascii", "backslashreplace"), line


def _content(data: bytes, sections: list[SectionHeader], index: int) -> bytes:
    if index >= len(sections):
        raise PayloadError(f"cubin: no section {index}")
    return section_bytes(data, sections[index], "a table")


def _iter_relocations(
    data: bytes, sections: list[SectionHeader], table: SectionHeader, section_names: bytes
) -> Iterator[tuple[int, bytes]]:
    """The places in the line program that hold an address, with the name of the function."""
    layout = _RELOCATIONS[table.sh_type]
    rows = section_bytes(data, table, "relocations")
    symbols = _content(data, sections, table.sh_link)
    strings = _content(data, sections, sections[table.sh_link].sh_link)
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


def _iter_units(program: bytes) -> Iterator[_Unit]:
    start = 0
    while start + _HEADER.size <= len(program):
        length, version, _header_length = _HEADER.unpack_from(program, start)
        end = start + 4 + length
        if end > len(program):
            return
        if version in _VERSIONS:
            with contextlib.suppress(IndexError, ValueError, struct.error):
                yield _Unit.parse(program[start:end], start, version)
        start = end


class _Unit(NamedTuple):
    """The line program of one compilation unit.

    Attributes:
        program: its own bytes.
        start: its offset in the section.
        line_base, line_range, opcode_base: how special opcodes advance the line.
        operands: how many operands each standard opcode has.
        files: folder and name by number, from 1. The paths of a hostile unit could fill the memory.
    """

    program: bytes
    start: int
    line_base: int
    line_range: int
    opcode_base: int
    operands: bytes
    files: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, program: bytes, start: int, version: int) -> _Unit:
        """Read the header.

        Raises:
            IndexError, ValueError, struct.error: it leaves the unit.
        """
        at = _HEADER.size + (3 if version >= 4 else 2)
        line_base, line_range, opcode_base = struct.unpack_from("<bBB", program, at)
        if not line_range or not opcode_base:
            raise ValueError("no special opcodes")
        at += 3
        operands = program[at : at + opcode_base - 1]
        at += opcode_base - 1
        folders = [""]
        while program[at]:
            text, at = _string(program, at)
            folders.append(text)
        at += 1
        files = []
        while program[at]:
            name, at = _string(program, at)
            folder, at = _uleb(program, at)
            _time, at = _uleb(program, at)
            _size, at = _uleb(program, at)
            inside = folder < len(folders) and not name.startswith("/")
            files.append((folders[folder] if inside else "", name))
        return cls(program, start, line_base, line_range, opcode_base, operands, tuple(files))

    def line_at(self, offset: int) -> SourceLine | None:
        """The first line of the sequence whose address is at ``offset`` of the section, or None."""
        at = offset - self.start
        if self.program[max(at - len(_SET_ADDRESS), 0) : at] != _SET_ADDRESS:
            return None
        try:
            return self._first_row(at + 8)
        except (IndexError, ValueError):
            return None

    def _first_row(self, at: int) -> SourceLine | None:
        """The first row that is not of an inlined function."""
        program = self.program
        file = line = 1
        inlined = 0
        for _ in range(_MOST_OPCODES):
            opcode = program[at]
            at += 1
            if opcode >= self.opcode_base:
                line += self.line_base + (opcode - self.opcode_base) % self.line_range
            elif opcode == 0:
                size, at = _uleb(program, at)
                kind = program[at]
                if kind == _END_SEQUENCE:
                    return None
                if kind == _INLINED_CALL:
                    inlined, _ = _uleb(program, at + 1)
                at += size
                continue
            elif opcode == _ADVANCE_LINE:
                step, at = _sleb(program, at)
                line += step
                continue
            elif opcode == _SET_FILE:
                file, at = _uleb(program, at)
                continue
            elif opcode == _FIXED_ADVANCE_PC:
                at += 2
                continue
            elif opcode != _COPY:
                for _ in range(self.operands[opcode - 1]):
                    _, at = _uleb(program, at)
                continue
            # A row.
            if not inlined and line > 0 and 0 < file <= len(self.files):
                folder, name = self.files[file - 1]
                return f"{folder}/{name}" if folder else name, line
        return None


def _string(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\0", at)
    return data[at:end].decode("utf-8", "backslashreplace"), end + 1


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MOST_LEB_BYTES):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, at + index + 1
    raise ValueError("a number of more than 64 bits")


def _sleb(data: bytes, at: int) -> tuple[int, int]:
    value, end = _uleb(data, at)
    bits = 7 * (end - at)
    return value - (1 << bits) if value >> (bits - 1) else value, end
