"""Pages of spares that a running process has, seen from outside (``negativa misses --pid``).

The kernel maps up to 16 pages around a page that is touched, if they are in memory already
(``fault_around_bytes``), so pages that nothing touched are among them. A page that left memory
again is missing. Sources: proc_pid_maps(5), proc_pid_pagemap(5).
"""

from __future__ import annotations

import array
import os
from pathlib import Path

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.models.file_kinds import is_spare, library_of_spare
from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.pages.misses import Miss, Misses
from pytest_negativa.pages.note import last_trailer
from pytest_negativa.tracing.mappings import DELETED, parse_maps

# Bits 62 and 63: the page is swapped, or in memory.
_MAPPED = 3 << 62


def pages_of_process(pid: int) -> list[Misses]:
    """The pages of spares that a process has, by library.

    Raises:
        StoreError: the process is gone, or is another user's.
        FormatError: a spare is gone, or is damaged.
    """
    process = Path("/proc", str(pid))
    found: dict[str, dict[int, Miss]] = {}
    try:
        # Spares are named as the process sees them, which may be in a container.
        with (process / "pagemap").open("rb", buffering=0) as pagemap:
            for mapping in parse_maps((process / "maps").read_bytes()):
                path = mapping.file.path
                if not is_spare(path.removesuffix(DELETED)):
                    continue
                words = array.array("Q")
                place = mapping.start // PAGE_SIZE * words.itemsize
                size = (mapping.end - mapping.start) // PAGE_SIZE * words.itemsize
                words.frombytes(os.pread(pagemap.fileno(), size, place))
                pages = found.setdefault(path, {})
                for page, word in enumerate(words, mapping.offset // PAGE_SIZE):
                    if word & _MAPPED:
                        pages[page] = Miss(1, page * PAGE_SIZE, fetched=mapping.executable)
    except OSError as e:
        raise StoreError(f"process {pid}: its pages cannot be read: {e.strerror}") from e
    return [_of_spare(process, path, pages) for path, pages in sorted(found.items())]


def _of_spare(process: Path, path: str, pages: dict[int, Miss]) -> Misses:
    """Name the library of a spare."""
    library = library_of_spare(path)
    if library is None:
        raise FormatError(path, None, "was deleted, so its library is unknown")
    trailer = last_trailer(Path(f"{process}/root{path}"))
    pages = {page: pages[page] for page in sorted(pages)}
    return Misses(library.rpartition("/")[2], trailer.original, trailer.original_size, pages)
