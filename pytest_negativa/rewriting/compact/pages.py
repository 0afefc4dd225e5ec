"""Decides which pages of a library's file stay, and gives them their new offsets.

A page's new place is its rank among the pages that stay. So one monotonic map gives the new offset
of every byte in a segment. Addresses don't change, and offsets stay congruent to them. Bytes
between and behind the segments leave the file: padding, and sections that are never loaded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    PF_X,
    PT_LOAD,
    SHF_EXECINSTR,
    ProgramHeader,
    SectionHeader,
)
from pytest_negativa.models.spans import (
    Range,
    Span,
    around,
    intersection,
    minus,
    round_up,
    size,
    union,
    within,
)
from pytest_negativa.rewriting.compact.original_tables import ElfTables


@dataclass(frozen=True, slots=True)
class PageMap:
    """The pages that stay, as disjoint ascending ranges of old offsets, whole pages each.

    Attributes:
        kept: the ranges.
        page_size: bytes.
        places: new offset of each range's start.
    """

    kept: tuple[Span, ...]
    page_size: int
    places: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of all pages that stay."""
        return size(self.kept)

    def new_offset(self, offset: int) -> int | None:
        """The new offset of ``offset``; None if its page leaves the file."""
        at = bisect.bisect_right(self.kept, (offset, 1 << 64)) - 1
        if at < 0 or offset >= self.kept[at][1]:
            return None
        return self.places[at] + offset - self.kept[at][0]

    def offset_of(self, offset: int) -> int:
        """The new offset of ``offset``, whose page stays."""
        new = self.new_offset(offset)
        assert new is not None
        return new

    def nearest_offset(self, offset: int) -> int:
        """As ``new_offset``; if the page leaves the file, the new offset of the next that stays."""
        new = self.new_offset(offset)
        if new is not None:
            return new
        at = bisect.bisect_right(self.kept, (offset, 1 << 64))
        return self.places[at] if at < len(self.places) else self.size

    def pieces(self, start: int, end: int) -> Iterator[Span]:
        """The parts of ``[start, end)`` that stay, as ranges of old offsets."""
        return intersection([(start, end)], self.kept)


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a segment that becomes a ``PT_LOAD``; old offsets.

    The addresses from ``end`` to the next run are zeros.
    """

    start: int
    end: int
    executable: bool


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The pages that stay and the segments they make.

    Attributes:
        pages: the pages.
        runs: a row for each ``PT_LOAD`` of the old file.
        holes: ranges within segments that leave the file; old offsets.
        given_up: bytes of holes that stay in the file, because program headers are limited.
    """

    pages: PageMap
    runs: tuple[tuple[Run, ...], ...]
    holes: tuple[Range, ...]
    given_up: int = 0


def lay_out(
    tables: ElfTables,
    zeros: Sequence[Range],
    page_size: int,
    max_headers: int,
    functions: Sequence[int] = (),
) -> PageLayout:
    """Find the holes in ``zeros`` and split the segments around them.

    Args:
        tables: the library's.
        zeros: disjoint ascending ranges of file offsets whose bytes are not needed.
        page_size: bytes; holes are whole pages.
        max_headers: limit of program headers; the smallest holes are given up to keep it.
        functions: addresses of code; a section that has one holds code, even without the flag.
    """
    code = _code_sections(tables, functions)
    holes = list(_find_holes(tables, zeros, page_size))
    given_up = 0
    while True:
        runs = []
        left: list[Range] = []
        for load in tables.loads:
            own = [h for h in holes if load.p_offset <= h[0] and h[1] <= load.file_end]
            own_runs, own_holes = _split(load, own, code, page_size)
            runs.append(own_runs)
            left += own_holes
        others = sum(1 for s in tables.segments if s.p_type != PT_LOAD)
        excess = others + sum(map(len, runs)) - max_headers
        if excess <= 0 or not left:
            kept = _kept_pages(tables, left, page_size)
            pages = _place(kept, page_size)
            return PageLayout(pages, tuple(runs), tuple(sorted(left)), given_up)
        left.sort(key=lambda hole: (hole[1] - hole[0], hole[0]))
        given_up += size(left[:excess])
        holes = sorted(left[excess:])


def pages_without(tables: ElfTables, holes: Iterable[Range], page_size: int) -> PageMap:
    """The pages that stay if holes, whole pages of segments, leave the file and memory."""
    return _place(_kept_pages(tables, holes, page_size), page_size)


def _find_holes(tables: ElfTables, zeros: Sequence[Range], page_size: int) -> Iterator[Range]:
    """Whole pages in ``zeros``, inside one segment each and never its first page."""
    loads = sorted((s for s in tables.loads if s.p_filesz), key=lambda s: s.p_offset)
    starts = [s.p_offset for s in loads]
    for start, end in zeros:
        at = bisect.bisect_right(starts, start) - 1
        if at < 0 or end > loads[at].file_end:
            continue
        # A PT_LOAD must have bytes of the file before its zeros.
        yield from within([(max(start, loads[at].p_offset + 1), end)], page_size)


def _split(
    load: ProgramHeader, holes: Sequence[Range], code_sections: Sequence[Range], page_size: int
) -> tuple[tuple[Run, ...], list[Range]]:
    """Split a segment around holes; also returns the holes that are left, some of them smaller.

    Zeros behind a run have its protection. SELinux counts anonymous executable memory as execmem,
    so a run before a hole is never executable.
    """
    executable = bool(load.p_flags & PF_X)
    code = code_sections if executable else ()
    runs: list[Run] = []
    left: list[Range] = []
    start = load.p_offset
    for hole_start, hole_end in holes:
        code_end = _code_end(code, start, hole_start, page_size)
        if code_end is not None:
            if code_end >= hole_start:
                # All pages before the hole have code: leave one page of zeros.
                code_end = hole_start
                hole_start += page_size
                if hole_start >= hole_end:
                    continue
            runs.append(Run(start, code_end, executable=True))
            start = code_end
        runs.append(Run(start, hole_start, executable=False))
        left.append((hole_start, hole_end))
        start = hole_end
    if start < load.file_end or not runs:
        has_code = _code_end(code, start, load.file_end, page_size) is not None
        runs.append(Run(start, load.file_end, executable and (has_code or not left)))
    return tuple(runs), left


def _code_sections(tables: ElfTables, functions: Sequence[int]) -> list[Range]:
    ordered = sorted(functions)

    def holds_code(section: SectionHeader) -> bool:
        first = bisect.bisect_left(ordered, section.sh_addr)
        behind = bisect.bisect_left(ordered, section.sh_addr + section.sh_size)
        return bool(section.sh_flags & SHF_EXECINSTR) or first < behind

    return [
        (s.sh_offset, s.file_end)
        for s in tables.sections
        if s.loaded and s.sh_size and holds_code(s)
    ]


def _code_end(code: Sequence[Range], start: int, end: int, page_size: int) -> int | None:
    """The end of the last page with code in ``[start, end)``, or None if there is no code."""
    ends = [min(e, end) for s, e in code if s < end and e > start]
    return round_up(max(ends), page_size) if ends else None


def _kept_pages(tables: ElfTables, holes: Iterable[Range], page_size: int) -> tuple[Span, ...]:
    # The ELF header is in page 0, which need not be in a segment.
    loaded = ((s.p_offset, s.file_end) for s in tables.loads)
    return union(minus(around([(0, 1), *loaded], page_size), union(holes)))


def _place(kept: tuple[Span, ...], page_size: int) -> PageMap:
    places = tuple(itertools.accumulate((span.size for span in kept), initial=0))[:-1]
    return PageMap(kept, page_size, places)


def unsegmented(tables: ElfTables, pages: PageMap) -> Iterator[Span]:
    """Ranges in pages that stay which are in no segment; old offsets."""
    kept = ((max(start, EHDR.size), end) for start, end in pages.kept)
    return minus(kept, union((s.p_offset, s.file_end) for s in tables.loads))
