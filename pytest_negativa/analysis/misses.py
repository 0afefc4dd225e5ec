"""Logs of pages that came back to the functions and the GPU code on these pages."""

from __future__ import annotations

import bisect
import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.errors import FormatError, NegativaError, ReconstructError
from pytest_negativa.gpucode.elf import HostElf, HostSection, read_host_elf
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.functions import FunctionTable
from pytest_negativa.installed.libraries import find_libraries
from pytest_negativa.models.base import Listing
from pytest_negativa.models.library import Element, LibraryMap, Scope
from pytest_negativa.models.misses import (
    MISSES_VERSION,
    CodeKind,
    MissedCode,
    MissedLibrary,
)
from pytest_negativa.rewriting.compact.rebuild import read_note
from pytest_negativa.slimming.spares import rebuild
from pytest_negativa.spare.misses import Misses
from pytest_negativa.spare.note import Note

_UNWIND_TABLES = (".eh_frame", ".gcc_except_table")


def report_misses(logs: Sequence[Misses], places: Sequence[Path]) -> Listing[MissedLibrary]:
    """Tell what came back.

    Args:
        logs: by original.
        places: folders with the libraries, slimmed or not, or libraries.
    """
    rows = [_row(misses, places) for misses in logs if misses.pages]
    return Listing(
        format_version=MISSES_VERSION,
        rows=tuple(sorted(rows, key=lambda row: (-row.misses, row.name))),
    )


@contextlib.contextmanager
def open_original(misses: Misses, places: Sequence[Path]) -> Iterator[tuple[Path, ByteSource]]:
    """The original of a log: as it lies there, or put together from the library and its spare.

    Yields:
        The library that was found, and its original.

    Raises:
        NegativaError: neither is in ``places``, or the spare is missing or damaged.
    """
    for path in _named(misses.name, places):
        with ByteSource(path) as library:
            note = _note_of(library)
            if (
                note is None
                and library.size == misses.original_size
                and bytes.fromhex(library.sha256()) == misses.original
            ):
                yield path, library
                return
        if note is not None and note.original == misses.original:
            with tempfile.TemporaryDirectory(prefix="negativa-") as folder:
                rebuild(path, Path(folder, misses.name))
                with ByteSource(Path(folder, misses.name)) as source:
                    yield path, source
            return
    raise ReconstructError(
        f"{misses.name}: the library with this content (SHA-256 {misses.original.hex()[:12]}...) "
        f"is not in {', '.join(map(str, places))}, slimmed or not; name its folder: "
        "negativa misses FOLDER"
    )


def _named(name: str, places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        for path in find_libraries(str(place)).paths:
            if path.name == name:
                yield path


def _note_of(library: ByteSource) -> Note | None:
    try:
        return read_note(library)
    except FormatError:
        return None


def _row(misses: Misses, places: Sequence[Path]) -> MissedLibrary:
    path: Path | None = None
    code: tuple[MissedCode, ...] = ()
    unknown = None
    try:
        with open_original(misses, places) as (path, source):
            code = _find_code(source, misses)
    except NegativaError as e:
        unknown = str(e)
    return MissedLibrary(
        name=misses.name,
        sha256=misses.original.hex(),
        size=misses.original_size,
        path=None if path is None else str(path),
        pages=len(misses.pages),
        beside=sum(not miss.times for miss in misses.pages.values()),
        misses=sum(miss.times for miss in misses.pages.values()),
        code=code,
        unknown=unknown,
    )


class _Place(NamedTuple):
    """What lies at an offset of the original: a ``MissedCode`` without its counts."""

    kind: CodeKind
    offset: int | None
    name: str | None = None


def _find_code(source: ByteSource, misses: Misses) -> tuple[MissedCode, ...]:
    """What the processes touched first on each page.

    Raises:
        FormatError: the original can't be read.
    """
    elf = read_host_elf(source, with_segments=True)
    finder = _Finder(source, elf, map_library(source, elf, Scope(headers_only=True)))
    pages: Counter[_Place] = Counter()
    counts: Counter[_Place] = Counter()
    for miss in misses.pages.values():
        if miss.times:
            place = finder.find(miss.first)
            pages[place] += 1
            counts[place] += miss.times
    starts = frozenset(p.offset for p in pages if p.kind is CodeKind.GPU_CODE and p.offset)
    library_map = map_library(source, elf, Scope(starts=starts))
    blocks = {b.payload.start: b for b in library_map.iter_code() if b.payload.start in starts}
    return tuple(
        _missed_code(place, library_map, blocks, pages=pages[place], misses=count)
        for place, count in sorted(
            counts.items(), key=lambda item: (-item[1], item[0].kind.value, item[0].offset or 0)
        )
    )


def _missed_code(
    place: _Place,
    library_map: LibraryMap,
    blocks: Mapping[int, Element],
    *,
    pages: int,
    misses: int,
) -> MissedCode:
    code = MissedCode(
        kind=place.kind, offset=place.offset, name=place.name, pages=pages, misses=misses
    )
    if place.kind is not CodeKind.GPU_CODE or place.offset is None:
        return code
    block = blocks[place.offset]
    return replace(
        code,
        region=None if block.region is None else block.anchor,
        arch=str(block.arch),
        kernels=tuple(kernel.name for kernel in library_map.kernels_of(block.content)),
    )


class _Finder:
    """Tells what lies at an offset of an original."""

    def __init__(self, source: ByteSource, elf: HostElf, library_map: LibraryMap) -> None:
        self._sections = elf.sections
        self._functions = FunctionTable(source, elf)
        self._blocks = sorted(library_map.iter_code(), key=lambda block: block.payload.start)
        self._regions = sorted(region.span for region in library_map.iter_regions())

    def find(self, offset: int) -> _Place:
        at = bisect.bisect_right(self._blocks, offset, key=lambda block: block.payload.start) - 1
        if at >= 0 and offset < self._blocks[at].payload.end:
            return _Place(CodeKind.GPU_CODE, self._blocks[at].payload.start)
        at = bisect.bisect_right(self._regions, offset, key=lambda span: span.start) - 1
        if at >= 0 and offset < self._regions[at].end:
            return _Place(CodeKind.GPU_HEADERS, self._regions[at].start)
        for section in self._sections:
            if section.offset <= offset < section.offset + section.size:
                return self._in_section(section, offset)
        return _Place(CodeKind.OTHER, None)

    def _in_section(self, section: HostSection, offset: int) -> _Place:
        if section.name in _UNWIND_TABLES:
            return _Place(CodeKind.UNWIND_TABLES, section.offset, section.name)
        if not section.executable:
            return _Place(CodeKind.OTHER, section.offset, section.name)
        shift = section.vaddr - section.offset
        function = self._functions.find(offset + shift)
        if function is None:
            return _Place(CodeKind.FUNCTION, None)
        return _Place(CodeKind.FUNCTION, function.address - shift, function.name)
