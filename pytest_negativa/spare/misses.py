"""Pages that came back to libraries with a spare; ``hostcode.page_logs`` reads and writes them.

The pages of spares that a running process has are seen from outside: nothing is set up in it. The
kernel maps up to 16 pages around a page that is touched, if they are in memory already
(``fault_around_bytes``), so pages that nothing touched are among them. A page that left memory
again is missing. Sources: proc_pid_maps(5), proc_pid_pagemap(5).
"""

from __future__ import annotations

import array
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.models.spans import PAGE_SIZE, Span, union
from pytest_negativa.spare.note import last_trailer


class Miss(NamedTuple):
    """A page that came back.

    Attributes:
        times: how many processes missed it; forked children count with their parent. 0: it came
            back beside another page.
        first: file offset, in the original, of what the first of them touched.
        fetched: whether that was to run code, and not to read.
    """

    times: int
    first: int
    fetched: bool


@dataclass(frozen=True, slots=True)
class Misses:
    """The pages of one library that came back.

    Attributes:
        name: the library's file name.
        original: SHA-256 of the original.
        original_size: bytes.
        pages: what came back, by number of the page in the original, ascending.
        unwatched: more may have come back from some time on.
    """

    name: str
    original: bytes
    original_size: int
    pages: Mapping[int, Miss]
    unwatched: bool = False

    def ranges(self) -> tuple[Span, ...]:
        """The pages that came back, as file offsets; neighbours are one span."""
        return union((page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in self.pages)

    def __add__(self, other: Misses) -> Misses:
        """The pages that came back in all, of the same original."""
        pages = dict(self.pages)
        for page, miss in other.pages.items():
            before = pages.get(page)
            if before is None or not before.times:
                pages[page] = miss
            else:
                pages[page] = before._replace(times=before.times + miss.times)
        return Misses(
            self.name,
            self.original,
            self.original_size,
            dict(sorted(pages.items())),
            unwatched=self.unwatched or other.unwatched,
        )


# ---- Those of a running process ----

_SPARE = re.compile(r"(.+)\.[0-9a-f]{16}\.spare")
_DELETED = " (deleted)"
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
            for line in os.fsdecode((process / "maps").read_bytes()).splitlines():
                addresses, protection, offset, _, _, *path = line.split(maxsplit=5)
                if not path or _SPARE.fullmatch(path[0].removesuffix(_DELETED)) is None:
                    continue
                start, end = (int(word, 16) for word in addresses.split("-"))
                words = array.array("Q")
                place = start // PAGE_SIZE * words.itemsize
                size = (end - start) // PAGE_SIZE * words.itemsize
                words.frombytes(os.pread(pagemap.fileno(), size, place))
                first = int(offset, 16) // PAGE_SIZE
                pages = found.setdefault(path[0], {})
                for page, word in enumerate(words, first):
                    if word & _MAPPED:
                        pages[page] = Miss(1, page * PAGE_SIZE, fetched="x" in protection)
    except OSError as e:
        raise StoreError(f"process {pid}: its pages cannot be read: {e.strerror}") from e
    return [_of_spare(process, path, pages) for path, pages in sorted(found.items())]


def _of_spare(process: Path, path: str, pages: dict[int, Miss]) -> Misses:
    """Name the library of a spare."""
    name = _SPARE.fullmatch(path)
    if name is None:
        raise FormatError(path, None, "was deleted, so its library is unknown")
    trailer = last_trailer(Path(f"{process}/root{path}"))
    pages = {page: pages[page] for page in sorted(pages)}
    return Misses(name[1].rpartition("/")[2], trailer.original, trailer.original_size, pages)
