"""Pages of a library that stay, and their new offsets; the largest holes if there are many.

A page's new place is its rank among the pages that stay. So one monotonic map gives the new offset
of every byte in a segment. Addresses don't change, and offsets stay congruent to them. Bytes
between and behind the segments leave the file: padding, and sections that are never loaded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pytest_negativa.gpucode.elf import ElfTables
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    PF_W,
    PF_X,
    PT_LOAD,
    PT_NULL,
    PT_PHDR,
    SHF_EXECINSTR,
    ProgramHeader,
)
from pytest_negativa.models.spans import (
    Range,
    Span,
    around,
    intersection,
    minus,
    size,
    union,
    within,
)


@dataclass(frozen=True, slots=True)
class PageMap:
    """The pages that stay, as disjoint ascending ranges of old offsets, whole pages each.

    Attributes:
        kept: the ranges.
        page_size: bytes.
        places: new offset of each range's start.
        holes: ranges within segments that leave the file; old offsets.
        given_up: bytes of holes that stay in the file, because program headers are limited.
    """

    kept: tuple[Span, ...]
    page_size: int
    places: tuple[int, ...]
    holes: tuple[Span, ...]
    given_up: int = 0

    def offset_of(self, offset: int) -> int:
        """The new offset of ``offset``, whose page stays."""
        assert any(self.pieces(offset, offset + 1))
        return self.nearest_offset(offset)

    def nearest_offset(self, offset: int) -> int:
        """The new offset of ``offset``, or of the next page that stays."""
        at = bisect.bisect_right(self.kept, offset, key=attrgetter("end"))
        if at == len(self.kept):
            return size(self.kept)
        return self.places[at] + max(offset - self.kept[at].start, 0)

    def pieces(self, start: int, end: int) -> Iterator[Span]:
        """The parts of ``[start, end)`` that stay, as ranges of old offsets."""
        return intersection([(start, end)], self.kept)


def lay_out(tables: ElfTables, zeros: Sequence[Range], page_size: int, max_headers: int) -> PageMap:
    """Find the holes in ``zeros``.

    Args:
        tables: the library's.
        zeros: disjoint ascending ranges of file offsets whose bytes are not needed.
        page_size: bytes; holes are whole pages.
        max_headers: limit of program headers; the smallest holes are given up to keep it.
    """
    # Inside one segment each. A PT_LOAD must have bytes of the file before its zeros.
    found = sorted(
        hole
        for load in tables.loads
        if load.p_filesz
        for hole in within(intersection([(load.p_offset + 1, load.file_end)], zeros), page_size)
    )
    others = sum(1 for s in tables.segments if s.p_type != PT_LOAD)
    holes = largest_holes(tables, found, max_headers - others, zeros=True)
    return pages_without(tables, holes, page_size, size(found) - size(holes))


def largest_holes(
    tables: ElfTables, holes: Sequence[Span], max_loads: int, *, zeros: bool
) -> tuple[Span, ...]:
    """The holes without the smallest, so that the library has at most ``max_loads`` PT_LOADs.

    Args:
        tables, max_loads: see above.
        holes: ascending.
        zeros: addresses of holes are zeros, not free.
    """
    while holes:
        loads = sum(1 for load in tables.loads for _ in _split(tables, load, holes, zeros))
        if (excess := loads - max_loads) <= 0:
            break
        left = sorted(holes, key=lambda hole: (hole[1] - hole[0], hole[0]))
        holes = sorted(left[excess:])
    return tuple(holes)


def _split(
    tables: ElfTables, load: ProgramHeader, holes: Sequence[Range], zeros: bool
) -> Iterator[ProgramHeader]:
    """Split a segment around holes.

    Zeros behind the bytes of a PT_LOAD have its protection. SELinux counts anonymous executable
    memory as execmem, so a PT_LOAD before a hole is not executable. If it has code, the zeros are
    a PT_LOAD of their own. Garbage collectors look for pointers in the PT_LOADs of data, so these
    cover the holes behind them; the spare takes the place of such zeros.
    """
    file_end, memory_end = load.p_offset + load.p_filesz, load.p_offset + load.p_memsz
    pieces = list(minus([(load.p_offset, file_end)], holes))
    # The zeros of a segment stay behind a hole; of one that is all hole, nothing stays.
    if memory_end > file_end and (not pieces or (pieces[-1].end < file_end and not zeros)):
        pieces.append(Span(file_end, file_end))
    starts = [*(piece.start for piece in pieces), memory_end][1:]
    for (start, end), next_start in zip(pieces, starts, strict=True):
        mapped_end = next_start if zeros or load.p_flags & PF_W or end == file_end else end
        flags = load.p_flags
        if zeros and end < file_end:
            flags &= ~PF_X
        if flags != load.p_flags and _has_code(tables, start, end):
            yield _part(load, start, end, end)
            start = end
        yield _part(load, start, end, mapped_end)._replace(p_flags=flags)


def _has_code(tables: ElfTables, start: int, end: int) -> bool:
    code = (s for s in tables.sections if s.sh_flags & SHF_EXECINSTR and s.in_file)
    return any(s.sh_offset < end and start < s.file_end for s in code)


def _part(load: ProgramHeader, start: int, end: int, mapped_end: int) -> ProgramHeader:
    return load._replace(
        p_offset=start,
        p_vaddr=load.p_vaddr + start - load.p_offset,
        p_paddr=load.p_paddr + start - load.p_offset,
        p_filesz=end - start,
        p_memsz=mapped_end - start,
    )


def moved_segments(tables: ElfTables, pages: PageMap, *, zeros: bool) -> Iterator[ProgramHeader]:
    """The program headers of a library with holes, whose addresses are ``zeros``, or else free."""
    for segment in tables.segments:
        if segment.p_type == PT_LOAD:
            for load in _split(tables, segment, pages.holes, zeros):
                yield _moved_load(load, pages)
        elif segment.p_type not in (PT_NULL, PT_PHDR):
            # PT_PHDR goes: the table gets another place.
            yield segment._replace(p_offset=pages.nearest_offset(segment.p_offset))


def _moved_load(load: ProgramHeader, pages: PageMap) -> ProgramHeader:
    # Without bytes in the file, a segment may be behind its end.
    offset = load.p_offset % pages.page_size
    if load.p_filesz:
        offset = pages.offset_of(load.p_offset)
    congruent = (load.p_vaddr - offset) % load.p_align == 0
    alignment = load.p_align if congruent else min(load.p_align, pages.page_size)
    return load._replace(p_offset=offset, p_align=alignment)


def pages_without(
    tables: ElfTables, holes: tuple[Span, ...], page_size: int, given_up: int = 0
) -> PageMap:
    """The pages that stay if holes, whole pages of segments, leave the file and memory."""
    # The ELF header is in page 0, which need not be in a segment.
    loaded = ((s.p_offset, s.file_end) for s in tables.loads)
    kept = union(minus(around([(0, 1), *loaded], page_size), union(holes)))
    places = tuple(itertools.accumulate((span.size for span in kept), initial=0))[:-1]
    return PageMap(kept, page_size, places, holes, given_up)


def unsegmented(tables: ElfTables, pages: PageMap) -> Iterator[Span]:
    """Ranges in pages that stay which are in no segment; old offsets."""
    kept = ((max(start, EHDR.size), end) for start, end in pages.kept)
    return minus(kept, union((s.p_offset, s.file_end) for s in tables.loads))
