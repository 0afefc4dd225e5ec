"""Pages that came back to libraries with a spare; ``pages.page_logs`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pytest_negativa.models.spans import PAGE_SIZE, Span, union


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
