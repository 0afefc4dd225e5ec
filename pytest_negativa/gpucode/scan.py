"""Finds the containers of GPU code (regions, bare frames) in one section."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_negativa.gpucode import fatbin, frames
from pytest_negativa.gpucode.elf import HostSection
from pytest_negativa.gpucode.fatbin import RegionFault, WalkBudget
from pytest_negativa.gpucode.source import Readable
from pytest_negativa.models.library import Frame, Problem, Region

# Sections that hold nothing but regions (names: fatbinary_section.h of the CUDA toolkit).
# Bytes there that are no region are damage, and reported; elsewhere they are other data.
FATBIN_SECTIONS = frozenset({".nv_fatbin", "__nv_relfatbin"})

# Regions mostly follow each other, so a look at what is next starts small; a stretch of
# other data is searched in ever larger steps.
_FIRST_WINDOW = 256
_WINDOW_GROWTH = 16
_MAX_WINDOW = 4 << 20

# More than anybody reads; without an end, 4 bytes of a crafted section would be a problem each.
_MAX_PROBLEMS = 1000


class Problems:
    """What was not understood in a library, up to a number of entries."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def add(self, offset: int, text: str) -> None:
        if len(self._found) < _MAX_PROBLEMS:
            self._found.append(Problem(offset=offset, text=text))
        elif len(self._found) == _MAX_PROBLEMS:
            self._found.append(Problem(offset=offset, text="further problems are not listed"))

    def found(self) -> tuple[Problem, ...]:
        return tuple(self._found)


def iter_containers(
    source: Readable, section: HostSection, problems: Problems
) -> Iterator[Region | Frame]:
    """All regions and bare cubin frames of a section, by offset; never overlapping.

    What looks like a region without being one is passed over. In a section that should hold
    regions alone it goes to ``problems``, with everything else that isn't understood.
    """
    strict = section.name in FATBIN_SECTIONS
    end = section.offset + section.size
    # Instructions hold no frames; a frame in a fatbin section would be a payload's.
    with_frames = not (strict or section.executable)
    magics = (fatbin.MAGIC, frames.MAGIC) if with_frames else (fatbin.MAGIC,)
    search = _Search(source, end, magics)
    stored = sum(stop - start for start, stop in _iter_stored(source, section.offset, end))
    budget = WalkBudget(source.path, stored)
    position = section.offset
    while (hit := search.next(position)) is not None:
        offset, magic = hit
        if strict and (unknown := _first_nonzero(source, position, offset)) is not None:
            problems.add(
                unknown,
                f"{section.name}: {offset - unknown:,} bytes before the next region are not "
                "understood",
            )
        found: Region | Frame | None = None
        try:
            if magic == fatbin.MAGIC:
                found = fatbin.parse_region(source, offset, end, budget)
            else:
                found = frames.parse_frame(source, offset, end, budget)
        except RegionFault as fault:
            if strict:
                problems.add(
                    fault.offset, f"{section.name}: region at {offset:#x}: {fault.problem}"
                )
        # An empty region is 16 bytes that could be anything where other data is around.
        if isinstance(found, Region) and not found.elements and not strict:
            found = None
        if found is None:
            position = offset + len(magic)
        else:
            yield found
            position = found.span.end
    if strict and (unknown := _first_nonzero(source, position, end)) is not None:
        problems.add(
            unknown, f"{section.name}: {end - unknown:,} bytes at its end are not understood"
        )


def _iter_stored(source: Readable, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of ``[start, end)`` that lie in the file."""
    while start < end and (found := source.next_stored(start)) is not None and found[0] < end:
        start = min(found[1], end)
        yield found[0], start


def _first_nonzero(source: Readable, start: int, end: int) -> int | None:
    for position, stored_end in _iter_stored(source, start, end):
        while position < stored_end:
            data = source.read(position, min(stored_end - position, _MAX_WINDOW))
            if stripped := data.lstrip(b"\0"):
                return position + len(data) - len(stripped)
            position += len(data)
    return None


class _Search:
    """The next occurrence of any magic number, reading the file in windows."""

    def __init__(self, source: Readable, end: int, magics: tuple[bytes, ...]) -> None:
        self._source = source
        self._end = end
        self._magics = magics
        self._overlap = max(map(len, magics)) - 1
        self._base = 0
        self._data = b""
        self._hits: dict[bytes, int] = {}
        self._window = _FIRST_WINDOW

    def next(self, position: int) -> tuple[int, bytes] | None:
        """Offset and magic of the first occurrence at or after ``position``."""
        while (stored := self._source.next_stored(position)) is not None:
            # What the file does not hold are zeros, and no magic number has any.
            position = stored[0]
            if position + self._overlap >= self._end:
                break
            if not self._base <= position < self._base + len(self._data) - self._overlap:
                self._load(position)
            if (hit := self._next_in_window(position)) is not None:
                return hit
            position = self._base + len(self._data) - self._overlap
            self._window = min(self._window * _WINDOW_GROWTH, _MAX_WINDOW)
        return None

    def _load(self, position: int) -> None:
        if position != self._base + len(self._data) - self._overlap:
            self._window = _FIRST_WINDOW
        self._base = position
        self._data = self._source.read(position, min(self._window, self._end - position))
        self._hits = dict.fromkeys(self._magics, -2)

    def _next_in_window(self, position: int) -> tuple[int, bytes] | None:
        best: tuple[int, bytes] | None = None
        for magic, known in self._hits.items():
            start = position - self._base
            # -1: no more in this window. Below start: passed, look further.
            if known != -1 and known < start:
                known = self._hits[magic] = self._data.find(magic, start)
            if known != -1 and (best is None or self._base + known < best[0]):
                best = (self._base + known, magic)
        return best
