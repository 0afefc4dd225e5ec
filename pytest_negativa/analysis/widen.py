"""Widens a lock by what came back to libraries that were slimmed with a spare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.analysis.misses import open_original
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.models.library import CodeBlock, LibraryMap, Scope
from pytest_negativa.models.lock import Lock, LockedLibrary, seal
from pytest_negativa.planning.lock import widen_library
from pytest_negativa.reporting.units import format_items
from pytest_negativa.spare.misses import Miss, Misses
from pytest_negativa.spare.note import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Widened:
    """A lock that keeps what came back, too.

    Attributes:
        lock: sealed.
        added: by path of the library, how many elements and frames it keeps more.
        not_locked: names of libraries with misses that the lock doesn't have.
    """

    lock: Lock
    added: dict[str, int]
    not_locked: tuple[str, ...]


def widen_lock(lock: Lock, logs: Sequence[Misses], places: Sequence[Path]) -> Widened:
    """Keep the GPU code that came back.

    Args:
        lock: what was proved.
        logs: by original.
        places: folders with the libraries, slimmed or not, or libraries.

    Raises:
        NegativaError: the original of a library is not there, or does not fit the lock.
    """
    missed = {misses.original.hex(): misses for misses in logs if misses.pages}
    rows = [_widen(row, missed[row.sha256], places) if row.sha256 in missed else row
            for row in lock.libraries]  # fmt: skip
    locked = {row.sha256 for row in lock.libraries}
    return Widened(
        lock=seal(replace(lock, libraries=tuple(rows))),
        added={
            new.path: new.kept_elements - old.kept_elements
            for old, new in zip(lock.libraries, rows, strict=True)
            if new.kept_elements > old.kept_elements
        },
        not_locked=tuple(m.name for digest, m in missed.items() if digest not in locked),
    )


def _widen(locked: LockedLibrary, misses: Misses, places: Sequence[Path]) -> LockedLibrary:
    unpacked = frozenset(c.offset for c in locked.kept if c.functions is not None)
    scope = Scope(starts=unpacked) if unpacked else Scope(headers_only=True)
    with open_original(misses, places) as (path, source):
        library_map = map_library(source, read_host_elf(source), scope)
    library = replace(library_map.library, path=str(path), sha256=locked.sha256)
    library_map = replace(library_map, library=library)
    devices = [ComputeCapability.parse(text) for text in locked.devices]
    return widen_library(locked, library_map, missed_code(misses, library_map, devices))


def missed_code(
    misses: Misses, library_map: LibraryMap, devices: Collection[ComputeCapability]
) -> dict[int, str]:
    """What came back of GPU code: how often, for people, by start of the payload or frame.

    The driver reads the headers of all elements of a region, and headers share pages with
    payloads. So a page counts for a payload if it lies within it, or if the payload was touched
    first on it. Else it counts if a device would load the element.

    Args:
        misses: of the library.
        library_map: of the original.
        devices: those of the lock.
    """
    loaded = library_map.loaded_starts(devices)
    found = {}
    for block in library_map.iter_code():
        pages = [
            (page, miss)
            for page, miss in _pages_of(block, misses)
            if block.start in loaded
            or block.start <= miss.first < block.end
            or (block.start <= page * PAGE_SIZE and (page + 1) * PAGE_SIZE <= block.end)
        ]
        if pages:
            times = max(miss.times for _, miss in pages)
            found[block.start] = (
                f"it came back {format_items(times, 'time', 'times')}"
                if times
                else "it came back beside other code"
            )
    return found


def _pages_of(block: CodeBlock, misses: Misses) -> Iterator[tuple[int, Miss]]:
    for page in range(block.start // PAGE_SIZE, -(-block.end // PAGE_SIZE)):
        if page in misses.pages:
            yield page, misses.pages[page]
