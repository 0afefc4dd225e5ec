"""Checks a compacted library against its original, before it gets its name.

The check is independent of the writer. It reads both files' tables by pyelftools or as bare rows,
and derives from map and plan what may differ. It compares what a process would see: every byte that
the original's segments load, and its protection. It also compares the sections that are never
loaded.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.original_tables import Range
from pytest_negativa.rewriting.compact.pages import merged
from pytest_negativa.rewriting.compact.records import CheckError
from pytest_negativa.rewriting.compact.second_reader import read_again
from pytest_negativa.rewriting.edits import Edits, Fill, Patch, merge_edits

_STEP = 256 << 10
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_REGION_HEADER_SIZE = 16
_PT_LOAD, _PT_NULL, _PT_PHDR = 1, 0, 6
_PF_X = 1
_SHT_NULL, _SHT_RELA, _SHT_DYNAMIC, _SHT_NOBITS = 0, 4, 6, 8
_SHF_ALLOC, _SHF_TLS = 0x2, 0x400
# Names of sections that may go, bytes of the longest, and the row without a name.
_STRIPPED = r"(\.symtab|\.strtab|\.debug.*)?"
_LONGEST_NAME = 4096
# In the ELF header: e_phoff and e_shoff; e_phnum, e_shentsize, e_shnum and e_shstrndx.
_HEADER_FIELDS = ((0x20, 0x30), (0x38, 0x40))
# A process loses nothing with these segments.
_DROPPED = {_PT_NULL, _PT_PHDR}


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 of both files in hex, taken from the bytes that were compared."""

    original: str
    compacted: str


def check_compacted(
    original: ByteSource,
    compacted: ByteSource,
    removal: Edits,
    edits: Edits,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    page_size: int,
) -> Digests:
    """Check the tables, then compare the files' bytes and hash both files in the same pass.

    Args:
        original, compacted: the files.
        removal: the planned edits of unused code.
        edits: the planned edits of kept GPU code.
        library_map, plan: of the original, or both None.
        page_size: bytes.

    Raises:
        CheckError: the files differ in bytes that may not change.
        FormatError: a file can't be read.
    """
    checker = _Checker(original, compacted, page_size)
    checker.check_changes(removal, _parts(library_map, plan, kept=False), "unused")
    if edits.changes:
        checker.check_changes(edits, _parts(library_map, plan, kept=True), "kept GPU code")
    header = compacted.read(0, _ELF_HEADER.size)
    fields = (Patch(start, header[start:end]) for start, end in _HEADER_FIELDS)
    checker.check_tables()
    return checker.compare(merge_edits(removal, edits, Edits.of(original.size, fields)))


def _parts(library_map: LibraryMap | None, plan: LibraryPlan | None, *, kept: bool) -> list[Range]:
    """The ranges of kept code, or of unused code and the headers of its regions."""
    ranges: list[Range] = []
    if library_map is None or plan is None:
        return ranges
    # A decision that is missing means kept.
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    for region in library_map.iter_regions():
        before = len(ranges)
        for element in region.elements:
            start, end = element.payload.start, element.payload.end
            if ((start, end) not in unused) == kept:
                ranges.append((element.header_offset, end))
        if len(ranges) > before and not kept:
            start = region.span.start
            ranges.append((start, start + _REGION_HEADER_SIZE))
    for frame in library_map.iter_frames():
        start, end = frame.span.start, frame.span.end
        if ((start, end) not in unused) == kept:
            ranges.append((start, end))
    return merged(ranges)


class Segment(NamedTuple):
    """A program header as a bare row."""

    type: int
    flags: int
    offset: int
    vaddr: int
    paddr: int
    file_size: int
    memory_size: int
    alignment: int


def read_segments(source: ByteSource) -> list[Segment]:
    """The program headers of a library."""
    header = _ELF_HEADER.unpack(source.read(0, _ELF_HEADER.size))
    rows = source.read(header[5], header[10] * _PROGRAM_HEADER.size)
    return list(map(Segment._make, _PROGRAM_HEADER.iter_unpack(rows)))


def gets_bytes(loads: Sequence[Segment], vaddr: int, offset: int, size: int) -> bool:
    """Whether the file's bytes at ``offset`` are those that get to ``vaddr``.

    Several PT_LOADs that are neighbours in the file and in memory may load them.

    Args:
        loads: the PT_LOADs of the file, by address.
        vaddr, offset, size: of the bytes.
    """
    end = vaddr + size
    first = bisect.bisect_left(loads, vaddr, key=_vaddr) - 1
    for load in itertools.islice(loads, max(first, 0), None):
        load_end = load.vaddr + load.file_size
        if load.vaddr <= vaddr < load_end and offset - load.offset == vaddr - load.vaddr:
            if end <= load_end:
                return True
            offset += load_end - vaddr
            vaddr = load_end
        elif load.vaddr > vaddr:
            break
    return vaddr >= end


def misplaced_section(original: ByteSource, result: ByteSource) -> str | None:
    """A problem with a section that symbols name; None: there is none.

    Tools take st_value - sh_addr + sh_offset for a symbol's place in the file. So a loaded section
    has its address and size, and all of its bytes; or none, and lies past the end of the file.
    ld.so's own section, its strings and relocations may move: they hold no symbol.
    """
    before, after = _section_headers(original), _section_headers(result)
    loads = sorted((s for s in read_segments(result) if s.type == _PT_LOAD), key=_vaddr)
    moved = {
        number for i, row in enumerate(before) if row[1] == _SHT_DYNAMIC for number in (i, row[6])
    }
    for index, (was, now) in enumerate(zip(before, after, strict=False)):
        if (
            index in moved
            or was[1] == _SHT_RELA
            or was[2] & (_SHF_ALLOC | _SHF_TLS) != _SHF_ALLOC
            or not was[5]
        ):
            continue
        where = f"section {index} at {was[3]:#x}"
        if (now[3], now[5]) != (was[3], was[5]):
            return f"{where} is at {now[3]:#x} and has {now[5]:#x} bytes instead of {was[5]:#x}"
        if now[1] == _SHT_NOBITS and now[4] < result.size:
            return f"{where} has no bytes, and its symbols have a place in the file"
        if now[1] != _SHT_NOBITS and not gets_bytes(loads, now[3], now[4], now[5]):
            return f"{where} has other bytes in the file than in memory"
    return None


class _Unloaded(NamedTuple):
    """A section that is never loaded and stays; sizes and offsets in bytes."""

    number: int
    offset_before: int
    size: int
    offset_after: int


class _HashedFile:
    """Reads a file and hashes its bytes in order, each once, as far as it is read in order."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._digest = hashlib.sha256()
        self._hashed = 0

    def read(self, offset: int, length: int) -> bytes:
        """See ``ByteSource.read``."""
        self._hash_up_to(offset)
        data = self._source.read(offset, length)
        if self._hashed < offset + length:
            self._digest.update(memoryview(data)[self._hashed - offset :])
            self._hashed = offset + length
        return data

    def sha256(self) -> str:
        """Hex digest of the whole file."""
        self._hash_up_to(self._source.size)
        return self._digest.hexdigest()

    def _hash_up_to(self, end: int) -> None:
        while self._hashed < end:
            data = self._source.read(self._hashed, min(_STEP, end - self._hashed))
            self._digest.update(data)
            self._hashed += len(data)


class _Checker:
    def __init__(self, original: ByteSource, compacted: ByteSource, page_size: int) -> None:
        self._original = original
        self._compacted = compacted
        self._page_size = page_size
        self._view_before = read_again(original)
        self._view_after = read_again(compacted)
        self._before = read_segments(original)
        self._after = read_segments(compacted)
        self._loads = [s for s in self._after if s.type == _PT_LOAD]
        self._by_address = sorted(self._loads, key=_vaddr)
        self._unloaded: list[_Unloaded] = []

    def check_changes(self, edits: Edits, allowed: Sequence[Range], name: str) -> None:
        for change in edits.changes:
            for start, end in _outside(change.start, change.end, allowed):
                # Padding may go with the code it pads: it is zeros before and after.
                size = end - start
                zeros = isinstance(change, Fill) and change.value == 0
                if not zeros or size > _STEP or any(self._original.read(start, size)):
                    self._fail(f"[{start:#x}, {end:#x}) would change and is not {name}")

    def check_tables(self) -> None:
        for load in self._loads:
            where = f"PT_LOAD at {load.vaddr:#x}"
            if load.offset + load.file_size > self._compacted.size:
                self._fail(f"{where} leaves the file")
            if load.file_size and (load.vaddr - load.offset) % load.alignment:
                self._fail(f"{where}: offset {load.offset:#x} is not congruent to the address")
        self._check_header()
        self._check_program_headers()
        self._check_other_segments()
        if self._view_before.sections:
            self._check_sections()
            self._check_unloaded_sections()
            if (problem := misplaced_section(self._original, self._compacted)) is not None:
                self._fail(problem)

    def _check_header(self) -> None:
        """Compare the ELF headers outside ``_HEADER_FIELDS``; no segment need have them."""
        before, after = (
            file.read(0, _ELF_HEADER.size) for file in (self._original, self._compacted)
        )
        for start, end in ((0, 0x20), (0x30, 0x38)):
            if before[start:end] != after[start:end]:
                self._fail(f"[{start:#x}, {end:#x}) of the ELF headers differ")
        largest = [
            max((s.alignment for s in segments if s.type == _PT_LOAD), default=0)
            for segments in (self._before, self._after)
        ]
        if largest[0] > largest[1]:
            self._fail(f"the load address is aligned to {largest[1]:#x} instead of {largest[0]:#x}")

    def _check_program_headers(self) -> None:
        header = _ELF_HEADER.unpack(self._compacted.read(0, _ELF_HEADER.size))
        start, end = header[5], header[5] + header[10] * _PROGRAM_HEADER.size
        for load in self._loads:
            mapped_end = load.offset + load.file_size
            mapped_end += -(load.vaddr + load.file_size) % self._page_size
            if load.file_size and load.offset < end and start < mapped_end:
                self._fail(f"the program headers at {start:#x} share a page with a PT_LOAD")

    def _check_other_segments(self) -> None:
        before, after = (
            [s._replace(offset=0) for s in segments if s.type not in (_PT_LOAD, *_DROPPED)]
            for segments in (self._before, self._after)
        )
        if before != after or any(s.type in _DROPPED for s in self._after):
            self._fail("a segment is gone, elsewhere in memory or has other flags")
        for segment in self._after:
            if segment.type != _PT_LOAD and segment.file_size:
                name = f"segment of type {segment.type:#x}"
                self._check_place(name, segment.vaddr, segment.offset, segment.file_size)

    def _check_sections(self) -> None:
        before, after = self._view_before, self._view_after
        if (before.build_id, before.soname) != (after.build_id, after.soname):
            self._fail("the build id or soname is another one")
        for section in after.sections:
            self._check_place(
                f"section {section.name}", section.vaddr, section.offset, section.size
            )

    def _check_unloaded_sections(self) -> None:
        """Check that sections that stay keep index and fields; the section of names may differ."""
        before, after = _section_headers(self._original), _section_headers(self._compacted)
        if len(after) < len(before):
            self._fail(f"{len(after)} sections of {len(before)}")
        names = _ELF_HEADER.unpack(self._original.read(0, _ELF_HEADER.size))[13]
        for index, (was, now) in enumerate(zip(before, after, strict=False)):
            loaded = bool(was[2] & _SHF_ALLOC)
            if index == names:
                continue
            if now[1] == _SHT_NULL and not loaded:
                name = self._name_at(before[names][4] + was[0]) if was[1] != _SHT_NULL else ""
                if not re.fullmatch(_STRIPPED, name):
                    self._fail(f"section {index}, {name}, is gone")
                continue
            kind = _SHT_NOBITS if loaded and now[1] == _SHT_NOBITS else was[1]
            if (kind, was[2:4], was[5:]) != (now[1], now[2:4], now[5:]):
                self._fail(f"section {index} is gone or another one")
            if not loaded and was[1] not in (_SHT_NULL, _SHT_NOBITS):
                self._unloaded.append(_Unloaded(index, was[4], was[5], now[4]))

    def _name_at(self, offset: int) -> str:
        end = min(offset + _LONGEST_NAME, self._original.size)
        return self._original.read(offset, end - offset).split(b"\0")[0].decode(errors="replace")

    def _check_place(self, name: str, vaddr: int, offset: int, size: int) -> None:
        if not gets_bytes(self._by_address, vaddr, offset, size):
            self._fail(f"{name}: address {vaddr:#x} does not get the bytes at {offset:#x}")

    def compare(self, changes: Edits) -> Digests:
        """Compare the bytes: segments first, as linkers put them first into files.

        Args:
            changes: all planned edits of the original.
        """
        original, compacted = _HashedFile(self._original), _HashedFile(self._compacted)
        self._check_image(original, compacted, changes)
        for section in self._unloaded:
            self._check_unloaded_bytes(original, compacted, section)
        return Digests(original.sha256(), compacted.sha256())

    def _check_unloaded_bytes(
        self, original: _HashedFile, compacted: _HashedFile, section: _Unloaded
    ) -> None:
        for position in range(0, section.size, _STEP):
            length = min(_STEP, section.size - position)
            was = original.read(section.offset_before + position, length)
            if was != compacted.read(section.offset_after + position, length):
                self._fail(f"the bytes of section {section.number} differ")

    def _check_image(self, original: _HashedFile, compacted: _HashedFile, changes: Edits) -> None:
        befores = [s for s in self._before if s.type == _PT_LOAD]
        for before in befores:
            position = before.vaddr
            memory_end = before.vaddr + before.memory_size
            for load in self._loads:
                if not before.vaddr <= load.vaddr < memory_end and load.vaddr != before.vaddr:
                    continue
                if load.vaddr != position:
                    self._fail(f"address {position:#x} is no longer mapped")
                self._check_protection(before, load)
                self._check_load(original, compacted, before, load, changes)
                position = load.vaddr + load.memory_size
            if position != memory_end:
                self._fail(f"memory ends at {position:#x} instead of {memory_end:#x}")
        if sum(s.memory_size for s in self._loads) != sum(s.memory_size for s in befores):
            self._fail("there are addresses that the original does not have")

    def _check_protection(self, before: Segment, load: Segment) -> None:
        lost = before.flags & ~load.flags
        if load.flags & ~before.flags or lost & ~_PF_X:
            self._fail(f"PT_LOAD at {load.vaddr:#x} has another protection")
        end = load.vaddr + load.file_size
        if lost and not self._view_before.sections:
            self._fail(f"PT_LOAD at {load.vaddr:#x} may hold code and is not executable")
        for section in self._view_before.sections if lost else ():
            if (
                section.executable
                and load.vaddr < section.vaddr + section.size
                and section.vaddr < end
            ):
                self._fail(f"{section.name} at {section.vaddr:#x} would not be executable")
        hole = load.memory_size > load.file_size
        ends_within = load.vaddr + load.file_size < before.vaddr + before.file_size
        if hole and ends_within and load.flags & _PF_X:
            self._fail(f"the zeros behind {load.vaddr + load.file_size:#x} would be executable")

    def _check_load(
        self,
        original: _HashedFile,
        compacted: _HashedFile,
        before: Segment,
        load: Segment,
        changes: Edits,
    ) -> None:
        shift = before.offset - before.vaddr
        file_end = before.offset + before.file_size
        start = load.vaddr + shift
        end = start + load.file_size
        if end > file_end:
            self._fail(f"address {load.vaddr:#x}: more bytes than the original has")
        for position in range(start, end, _STEP):
            length = min(_STEP, end - position)
            wanted = changes.applied_to(original.read(position, length), position)
            if wanted != compacted.read(load.offset + position - start, length):
                self._fail(f"the bytes at {position - shift:#x} and behind differ")
        # Behind the bytes come zeros: of holes first, then of .bss.
        zeros_end = min(start + load.memory_size, file_end)
        position = end
        for change in changes.overlapping(end, zeros_end):
            if change.start > position or not change.is_zero(position, change.end):
                break
            position = change.end
        if position < zeros_end:
            self._fail(f"address {position - shift:#x} would read as zero and is not unused")

    def _fail(self, problem: str) -> None:
        raise CheckError(self._original.path, f"the result fails its check: {problem}")


def _section_headers(source: ByteSource) -> list[tuple[int, ...]]:
    header = _ELF_HEADER.unpack(source.read(0, _ELF_HEADER.size))
    return list(
        _SECTION_HEADER.iter_unpack(source.read(header[6], header[12] * _SECTION_HEADER.size))
    )


def _vaddr(segment: Segment) -> int:
    return segment.vaddr


def _outside(start: int, end: int, ranges: Sequence[Range]) -> Iterator[Range]:
    """The parts of ``[start, end)`` that are in none of the disjoint ascending ``ranges``."""
    at = bisect.bisect_right(ranges, start, key=lambda found: found[1])
    while start < end:
        if at == len(ranges) or ranges[at][0] >= end:
            yield start, end
            return
        if start < ranges[at][0]:
            yield start, ranges[at][0]
        start = ranges[at][1]
        at += 1
