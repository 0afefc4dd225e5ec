"""Pages that came back, from logs to functions and GPU code; the original of a library."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.errors import (
    NegativaError,
    ReconstructError,
)
from pytest_negativa.gpucode.elf import HostElf, HostSection, read_host_elf
from pytest_negativa.gpucode.library import add_contents, map_library
from pytest_negativa.gpucode.source import ByteSource, read_fact
from pytest_negativa.gpucode.workers import LocalProcesses, Lost, run_tasks
from pytest_negativa.installed.libraries import find_libraries
from pytest_negativa.models.base import Listing
from pytest_negativa.models.library import CodeFinder, LibraryMap, Scope
from pytest_negativa.models.listing import (
    CodeKind,
    MissedCode,
    MissedLibrary,
)
from pytest_negativa.pages.functions import FunctionTable
from pytest_negativa.pages.misses import Misses
from pytest_negativa.rewriting.compact.rebuild import OriginalSource, read_note
from pytest_negativa.slimming.spares import find_spare

_place = partial(MissedCode, pages=0, misses=0)


def count_misses(logs: Sequence[Misses]) -> list[MissedLibrary]:
    """The libraries to which something came back, without the names of it; the most misses first.

    Args:
        logs: by original.
    """
    rows = (_counts(misses) for misses in logs if misses.pages)
    return sorted(rows, key=lambda row: (-row.misses, row.name))


def report_misses(
    logs: Sequence[Misses],
    places: Sequence[Path],
    *,
    top: int = 0,
) -> Listing[MissedLibrary]:
    """Tell what came back.

    Args:
        logs: by original.
        places: folders with the libraries, slimmed or not, or libraries.
        top: how many libraries have their ``code``, and how much of it has its kernels; 0: all. To
            read that takes nearly all of the time.
    """
    rows = count_misses(logs)
    shown = rows[: top or None]
    libraries = libraries_in(places, {row.name for row in shown})
    missed = {misses.original.hex(): misses for misses in logs}
    tasks = [
        (row, missed[row.sha256], [path for path in libraries if path.name == row.name])
        for row in shown
    ]
    done: dict[str, MissedLibrary] = {}
    for (row, *_), found in run_tasks(LocalProcesses(), partial(_add_code, top), tasks, len(tasks)):
        done[row.sha256] = replace(row, unknown=found) if isinstance(found, Lost) else found
    return Listing(rows=tuple(done.get(row.sha256, row) for row in rows))


def libraries_in(places: Sequence[Path], names: Collection[str]) -> list[Path]:
    """The libraries of these names in folders, and those that are named themselves."""
    return [path for place in places for path in find_libraries(str(place), names=names).paths]


@contextlib.contextmanager
def open_original(misses: Misses, libraries: Sequence[Path]) -> Iterator[tuple[Path, ByteSource]]:
    """The original of a log: as it lies there, or read from the library and its spare.

    Args:
        libraries: where it may be.

    Yields:
        The library that was found, and its original. Of a pair, the digest is not compared.

    Raises:
        NegativaError: it is none of ``libraries``, or the spare is missing or damaged.
    """
    for path in libraries:
        if path.name != misses.name:
            continue
        with ByteSource(path) as library:
            note = read_fact(path, read_note)
            if note is not None and note.original == misses.original:
                with ByteSource(find_spare(path)) as spare:
                    yield path, OriginalSource(library, spare)
                return
            if (
                note is None
                and library.size == misses.original_size
                and bytes.fromhex(library.sha256()) == misses.original
            ):
                yield path, library
                return
    raise ReconstructError(
        f"{misses.name}: the library with this content (SHA-256 {misses.original.hex()[:12]}...) "
        "is not there, slimmed or not; name its folder: negativa misses FOLDER"
    )


def _counts(misses: Misses) -> MissedLibrary:
    return MissedLibrary(
        name=misses.name,
        sha256=misses.original.hex(),
        size=misses.original_size,
        path=None,
        pages=len(misses.pages),
        beside=sum(not miss.times for miss in misses.pages.values()),
        misses=sum(miss.times for miss in misses.pages.values()),
        code=(),
        unknown=None,
    )


def _add_code(top: int, task: tuple[MissedLibrary, Misses, Sequence[Path]]) -> MissedLibrary:
    row, misses, libraries = task
    path = unknown = None
    code: tuple[MissedCode, ...] = ()
    try:
        with open_original(misses, libraries) as (path, source):
            code = _find_code(source, misses, top)
    except NegativaError as e:
        unknown = str(e)
    return replace(row, path=None if path is None else str(path), code=code, unknown=unknown)


def _find_code(source: ByteSource, misses: Misses, top: int) -> tuple[MissedCode, ...]:
    """The code that the processes touched first on each page.

    Raises:
        FormatError: the original can't be read.
    """
    elf = read_host_elf(source)
    headers = map_library(source, elf, Scope(headers_only=True))
    finder = _Finder(source, elf, headers)
    pages: Counter[MissedCode] = Counter()
    counts: Counter[MissedCode] = Counter()
    # Pages that came back beside others have no names, and are the most.
    for miss in (miss for miss in misses.pages.values() if miss.times):
        place = finder.find(miss.first)
        pages[place] += 1
        counts[place] += miss.times
    code = sorted(
        (replace(place, pages=pages[place], misses=count) for place, count in counts.items()),
        key=lambda one: (-one.misses, one.kind.value, one.offset or 0),
    )
    shown = code[: top or None]
    starts = frozenset(one.offset or 0 for one in shown if one.kind is CodeKind.GPU_CODE)
    library_map = add_contents(source, headers, Scope(starts=starts, calls=False))
    kernels = {
        block.payload.start: tuple(kernel.name for kernel in library_map.kernels_of(block.content))
        for block in library_map.iter_code()
        if block.payload.start in starts
    }
    return tuple(
        replace(one, kernels=kernels.get(one.offset or 0, ()))
        if one.kind is CodeKind.GPU_CODE
        else one
        for one in code
    )


class _Finder:
    """Tells what lies at an offset of an original, without its counts."""

    def __init__(self, source: ByteSource, elf: HostElf, library_map: LibraryMap) -> None:
        self._sections = elf.sections
        self._functions = FunctionTable(source, elf)
        self._code = CodeFinder(library_map.iter_code(), library_map.iter_regions())

    def find(self, offset: int) -> MissedCode:
        if (block := self._code.block_at(offset)) is not None:
            return _place(
                kind=CodeKind.GPU_CODE,
                offset=block.payload.start,
                arch=str(block.arch),
                region=block.region,
            )
        region = self._code.region_at(offset)
        if region is not None and offset < region.end:
            return _place(kind=CodeKind.GPU_HEADERS, offset=region.start)
        for section in self._sections:
            if section.offset <= offset < section.offset + section.size:
                return self._in_section(section, offset)
        return _place(kind=CodeKind.OTHER, offset=None)

    def _in_section(self, section: HostSection, offset: int) -> MissedCode:
        if not section.executable:
            return _place(kind=CodeKind.OTHER, offset=section.offset, name=section.name)
        shift = section.vaddr - section.offset
        function = self._functions.find(offset + shift)
        if function is None:
            return _place(kind=CodeKind.FUNCTION, offset=None)
        return _place(kind=CodeKind.FUNCTION, offset=function.address - shift, name=function.name)
