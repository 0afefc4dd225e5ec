"""Checks a cut library and its spare against the original, before they get their names.

The check is independent of the writer: it reads bare rows, and only the note's format is shared. It
goes through every page of every segment of the original. The page is in the library at the same
address, with the same protection and the same bytes, or it is in a hole of the note, and the spare
has it. The relocations are those of the original, but for two, and so are the names of the dynamic
strings. And the pair gives the original back, byte by byte.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NoReturn

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.check import (
    Segment,
    misplaced_section,
    read_segments,
)
from pytest_negativa.rewriting.compact.rebuild import original_bytes, read_note, read_trailer
from pytest_negativa.rewriting.compact.records import CheckError
from pytest_negativa.spare.note import Hole, Note

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PT_NULL, _PT_LOAD, _PT_DYNAMIC, _PT_PHDR = 0, 1, 2, 6
_PF_X, _PF_W, _PF_R = 1, 2, 4
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_JMPREL = (
    0, 2, 5, 7, 8, 10, 23,
)  # fmt: skip
_DYNAMIC = struct.Struct("<qQ")
# As R_X86_64_IRELATIVE, without a symbol; addend.
_RESOLVED = struct.Struct("<QQq")
_IRELATIVE = 37
_PAGE = 4096
_STEP = 1 << 20


def check_cut(original: ByteSource, library: ByteSource, spare: ByteSource) -> None:
    """Check the pair; see above.

    Raises:
        CheckError: the pair is wrong: the writer has a bug, or the disk is faulty.
        FormatError: a file can't be read.
    """
    try:
        note = read_note(library)
        if note is None:
            raise CheckError(original.path, "the cut library fails its check: it has no note")
        trailer = read_trailer(spare, note)
    except FormatError as e:
        raise CheckError(original.path, f"the cut library fails its check: {e}") from e
    _Checker(original, library, spare, note).check()
    digest = hashlib.sha256()
    for data in original_bytes(library, spare, trailer):
        digest.update(data)
    if digest.digest() != note.original or digest.hexdigest() != original.sha256():
        raise CheckError(original.path, "library and spare do not give the original back")


class _Checker:
    def __init__(
        self, original: ByteSource, library: ByteSource, spare: ByteSource, note: Note
    ) -> None:
        self._original = original
        self._library = library
        self._spare = spare
        self._note = note
        self._before = read_segments(original)
        self._after = read_segments(library)

    def check(self) -> None:
        # The first page has the ELF header, and its changed fields.
        header = self._library.read(0, _ELF_HEADER.size)
        fields = ((0x20, 0x30), (0x38, 0x40))
        self._header = [(start, header[start:end]) for start, end in fields]
        loads = [s for s in self._before if s.type == _PT_LOAD]
        new = [s for s in self._after if s.type == _PT_LOAD]
        if [s.vaddr for s in new] != sorted(s.vaddr for s in new):
            self._fail("its PT_LOADs are not in order")
        for load in loads:
            self._check_load(load, new)
        end = max(load.vaddr + load.memory_size for load in loads)
        added = [s for s in new if s.vaddr >= end]
        if len(added) != 4 or sum(s.memory_size for s in new) - sum(
            s.memory_size for s in added
        ) + sum(hole.end - hole.start for hole in self._note.holes) != sum(
            s.memory_size for s in loads
        ):
            self._fail("it has other addresses than the original")
        others = (_PT_LOAD, _PT_NULL, _PT_PHDR, _PT_DYNAMIC)
        if [s._replace(offset=0) for s in self._before if s.type not in others] != [
            s._replace(offset=0) for s in self._after if s.type not in others
        ]:
            self._fail("a segment is gone or another one")
        self._check_tables()
        if (problem := misplaced_section(self._original, self._library)) is not None:
            self._fail(problem)

    def _check_tables(self) -> None:
        """The tables that got a new place."""
        rows, ours = (self._table(*side, _DT_RELA, _DT_RELASZ) for side in self._sides())
        for at in range(0, len(ours), _RESOLVED.size):
            added = [_RESOLVED.unpack_from(ours, at + i * _RESOLVED.size) for i in range(2)]
            if all(info == _IRELATIVE for _, info, _ in added):
                break
        else:
            self._fail("nothing maps its spare")
        if ours[:at] + ours[at + 2 * _RESOLVED.size :] != rows:
            self._fail("its relocations are others")
        jumps, new_jumps = (self._table(*side, _DT_JMPREL, _DT_PLTRELSZ) for side in self._sides())
        if jumps != new_jumps:
            self._fail("its jump slots are others")
        strings, more = (self._table(*side, _DT_STRTAB, _DT_STRSZ) for side in self._sides())
        if not more.startswith(strings):
            self._fail("its dynamic strings are others")

    def _sides(self) -> tuple[tuple[ByteSource, list[Segment]], tuple[ByteSource, list[Segment]]]:
        return (self._original, self._before), (self._library, self._after)

    def _table(self, source: ByteSource, segments: list[Segment], tag: int, size_tag: int) -> bytes:
        """A table that the dynamic section names; empty if it names none."""
        section = next(s for s in segments if s.type == _PT_DYNAMIC)
        found: dict[int, int] = {}
        size = section.file_size - section.file_size % _DYNAMIC.size
        for key, value in _DYNAMIC.iter_unpack(source.read(section.offset, size)):
            if key == _DT_NULL:
                break
            found[key] = value
        if tag not in found:
            return b""
        address, size = found[tag], found.get(size_tag, 0)
        load = next(
            (
                s
                for s in segments
                if s.type == _PT_LOAD and s.vaddr <= address <= s.vaddr + s.file_size - size
            ),
            None,
        )
        if load is None:
            self._fail(f"no segment has its table at {address:#x}")
        return source.read(load.offset + address - load.vaddr, size)

    def _check_load(self, load: Segment, new: list[Segment]) -> None:
        position, end = load.vaddr, load.vaddr + load.memory_size
        shift = load.offset - load.vaddr
        while position < end:
            part = next((s for s in new if s.vaddr == position and s.memory_size), None)
            hole = next((h for h in self._note.holes if h.start == position), None)
            if part is not None and hole is None:
                if part.flags != load.flags:
                    self._fail(f"address {position:#x} has another protection")
                self._compare(part, position + shift, load)
                position += part.memory_size
            elif hole is not None and part is None:
                self._check_hole(hole, load, shift)
                position = hole.end
            else:
                self._fail(f"address {position:#x} is neither in the library nor in a hole")
        if position != end:
            self._fail(f"a segment ends at {position:#x} instead of {end:#x}")

    def _check_hole(self, hole: Hole, load: Segment, shift: int) -> None:
        bits = ((_PF_R, 1), (_PF_W, 2), (_PF_X, 4))
        wanted = sum(bit for flag, bit in bits if load.flags & flag)
        if hole.protection != wanted or hole.offset != hole.start + shift:
            self._fail(f"the hole at {hole.start:#x} is not described as the original has it")
        if hole.start % _PAGE or hole.end % _PAGE or hole.end > load.vaddr + load.file_size:
            self._fail(f"the hole at {hole.start:#x} is not made of whole pages of the file")
        for position in range(hole.offset, hole.offset + hole.end - hole.start, _STEP):
            size = min(_STEP, hole.offset + hole.end - hole.start - position)
            if self._original.read(position, size) != self._spare.read(position, size):
                self._fail(f"the spare has other bytes at {position:#x}")

    def _compare(self, part: Segment, offset: int, load: Segment) -> None:
        last = part.vaddr + part.memory_size == load.vaddr + load.memory_size
        file_end = load.offset + load.file_size
        expected = file_end - offset if last else part.memory_size
        if part.file_size != expected or part.alignment < _PAGE:
            self._fail(f"PT_LOAD at {part.vaddr:#x} has another size than the original's bytes")
        if (part.vaddr - part.offset) % part.alignment:
            self._fail(f"PT_LOAD at {part.vaddr:#x}: its offset is not congruent to its address")
        for done in range(0, part.file_size, _STEP):
            size = min(_STEP, part.file_size - done)
            wanted = bytearray(self._original.read(offset + done, size))
            if offset + done == 0:
                for start, data in self._header:
                    wanted[start : start + len(data)] = data
            if wanted != self._library.read(part.offset + done, size):
                self._fail(f"the bytes at {part.vaddr + done:#x} and behind differ")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckError(self._original.path, f"the cut library fails its check: {problem}")
