"""Functions of a library, by unwind tables and symbols; touched ones; the rows of a CPU report.

A ``HostUsage`` becomes the rows of a report: bytes, pages and functions by library.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf, read_host_elf, read_tables
from pytest_negativa.gpucode.elf_tables import (
    SHN_UNDEF,
    SHT_DYNSYM,
    SHT_SYMTAB,
    STT_FUNC,
    SYM,
    SectionHeader,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.pages import (
    HostLibrary,
    HostReport,
    HostRow,
    HostUsage,
)
from pytest_negativa.models.spans import minus
from pytest_negativa.models.spans import size as size_of

# Begins .eh_frame_hdr, see the Linux Standard Base 5.0, 10.6.2: version 1, and the encodings of
# the pointer (pcrel, sdata4), of the count (udata4) and of the table (datarel, sdata4). Linkers
# write no other. The table is sorted.
_HEAD = b"\x01\x1b\x03\x3b"
_PAIR = 8


class FunctionStarts:
    """Addresses of functions, sorted, as an unwinder looks them up.

    Args:
        base: what the offsets count from.
        offsets: sorted.
    """

    def __init__(self, base: int = 0, offsets: Sequence[int] = ()) -> None:
        self._base = base
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> int:
        return self._base + self._offsets[number]

    def within(self, start: int, end: int) -> range:
        """The numbers of the functions with code in a range of addresses.

        A function ends where the next one begins, at the latest.
        """
        first = max(bisect.bisect_right(self._offsets, start - self._base) - 1, 0)
        return range(first, bisect.bisect_left(self._offsets, end - self._base, first))


def function_starts(source: ByteSource, elf: HostElf) -> FunctionStarts | None:
    """Start addresses of functions; None if the table of ``.eh_frame_hdr`` can't be read.

    Raises:
        FormatError: the section leaves the file.
    """
    section = next((s for s in elf.sections if s.name == ".eh_frame_hdr"), None)
    if section is None or section.size < 12:
        return None
    data = source.read(section.offset, section.size)
    if not data.startswith(_HEAD):
        return None
    (count,) = struct.unpack_from("<I", data, 8)
    if 12 + count * _PAIR > len(data):
        raise FormatError(
            source.path,
            section.offset,
            f".eh_frame_hdr: {count} entries, more than it has room for",
        )
    pairs = array.array("i")
    pairs.frombytes(memoryview(data)[12 : 12 + count * _PAIR])
    # Not made into a list of addresses: there are a million, and few are looked at.
    return FunctionStarts(section.vaddr, pairs[::2])


def functions_within(starts: FunctionStarts, ranges: Sequence[tuple[int, int]]) -> Iterator[range]:
    """The numbers of functions that have code in ranges of addresses, each once.

    Args:
        ranges: sorted, without overlaps.
    """
    found = 0  # functions before this one are found or lie before
    for start, end in ranges:
        numbers = starts.within(start, end)
        yield numbers[max(found - numbers.start, 0) :]
        found = max(numbers.stop, found)


class HostFunction(NamedTuple):
    """A function of a library: its address, and its mangled name if it has a symbol."""

    address: int
    name: str | None


class FunctionTable:
    """Finds the function at an address, by symbols and unwind tables."""

    def __init__(self, source: ByteSource, elf: HostElf) -> None:
        """Raises:
        FormatError: a table leaves the file.
        """
        # The dynamic symbols of a stripped library.
        self._named = sorted(_functions(source, (SHT_SYMTAB, SHT_DYNSYM)) or ())
        self._starts = function_starts(source, elf) or FunctionStarts()

    def find(self, address: int) -> HostFunction | None:
        """The function at an address of the file; None if no table knows one."""
        at = bisect.bisect_right(self._named, address, key=lambda row: row[0]) - 1
        if at >= 0:
            start, (size, name) = self._named[at]
            if address < start + size:
                return HostFunction(start, name.decode(errors="replace"))
        numbers = self._starts.within(address, address + 1)
        return HostFunction(self._starts[numbers.start], None) if numbers else None


def local_functions(source: ByteSource) -> Iterator[tuple[int, tuple[int, bytes]]] | None:
    """Size and name of each function by address, also of local ones; None without symbol table.

    Raises:
        FormatError: the file is truncated.
    """
    return _functions(source, (SHT_SYMTAB,))


def _functions(
    source: ByteSource, kinds: Iterable[int]
) -> Iterator[tuple[int, tuple[int, bytes]]] | None:
    """The functions of the first table of one of these kinds."""
    sections = read_tables(source).sections
    for kind in kinds:
        for section in sections:
            if section.sh_type == kind and section.sh_link < len(sections):
                return _symbols(source, section, sections[section.sh_link])
    return None


def _symbols(
    source: ByteSource, section: SectionHeader, strings: SectionHeader
) -> Iterator[tuple[int, tuple[int, bytes]]]:
    rows = source.read(section.sh_offset, section.sh_size)
    names = source.read(strings.sh_offset, strings.sh_size)
    whole = len(rows) // SYM.size * SYM.size
    # Bare rows: there are a million.
    for name, info, _, section_index, value, size in SYM.struct.iter_unpack(rows[:whole]):
        if info & 15 == STT_FUNC and section_index != SHN_UNDEF and size:
            yield value, (size, names[name : names.find(b"\0", name)])


def summarize(usage: HostUsage) -> HostReport:
    """Rows and totals; functions are counted if the library is still where it was."""
    rows = map(_row, usage.libraries)
    return HostReport(
        run_ids=tuple(usage.processes),
        processors=usage.processors,
        processes=sum(usage.processes.values()),
        libraries=tuple(sorted(rows, key=lambda row: (row.touched - row.watched, row.path))),
        incomplete=usage.incomplete,
        failed=usage.failed,
        chosen=usage.chosen,
    )


def _row(library: HostLibrary) -> HostRow:
    known = None if library.unwatched else touched_functions(library)
    return HostRow(
        path=library.paths[0],
        size=library.size,
        watched=size_of(library.watched),
        touched=size_of(library.touched),
        functions=known and len(known[0]),
        touched_functions=known and sum(map(len, known[1])),
        unwatched=library.unwatched,
    )


def touched_functions(library: HostLibrary) -> tuple[FunctionStarts, list[range]] | None:
    """The functions, and the numbers of those on touched pages; None if they are not known."""
    path = next(filter(os.path.exists, library.paths), library.paths[0])
    with contextlib.suppress(FormatError), ByteSource(path) as source:
        elf = read_host_elf(source)
        is_traced = (source.size, elf.build_id) == (library.size, library.build_id)
        starts = function_starts(source, elf) if is_traced else None
        if starts is not None:
            ranges = unwatched_or_touched(elf, library)
            return starts, [*functions_within(starts, ranges)]
    return None


def unwatched_or_touched(elf: HostElf, library: HostLibrary) -> list[tuple[int, int]]:
    """Addresses of code that may have run: touched, or on pages that are not watched."""
    code = [section for section in elf.sections if section.executable]
    return sorted(
        (section.vaddr + start - section.offset, section.vaddr + end - section.offset)
        for section in code
        for start, end in minus(
            [(section.offset, section.offset + section.size)], library.untouched
        )
    )
