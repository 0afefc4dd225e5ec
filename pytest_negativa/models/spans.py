"""Spans of bytes: the sets that they make, the pages of 4 KiB that they touch or fill.

A span is also a pair, so each function takes pairs. "Disjoint" spans are ascending, and no two of
them share a byte, as ``union`` returns them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from pytest_negativa.models.base import NonNegative

Range = tuple[int, int]
"""A start and an end: a ``Span``, or as good as one."""

PAGE_SIZE = 4096
"""Of memory on x86-64, bytes."""


class Span(NamedTuple):
    """Half-open range ``start <= offset < end`` of a file, a memory image or an unpacked cubin."""

    start: NonNegative
    end: NonNegative

    @property
    def size(self) -> int:
        return self.end - self.start


class MovedSpan(NamedTuple):
    """Bytes ``[start, end)`` of an original, which lie at ``target`` in another file."""

    start: NonNegative
    end: NonNegative
    target: NonNegative


def union(spans: Iterable[Range]) -> tuple[Span, ...]:
    """The bytes of all spans, disjoint; spans that meet are one, empty spans are left out."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if united and start <= united[-1].end:
            united[-1] = Span(united[-1].start, max(united[-1].end, end))
        else:
            united.append(Span(start, end))
    return tuple(united)


def intersection(spans: Iterable[Range], others: Sequence[Range]) -> Iterator[Span]:
    """The parts of each span that lie in ``others``, which are disjoint."""
    for start, end in spans:
        at = bisect_right(others, start, key=itemgetter(1))
        while at < len(others) and others[at][0] < end:
            first, last = max(start, others[at][0]), min(end, others[at][1])
            if first < last:
                yield Span(first, last)
            at += 1


def common(sets: Iterable[tuple[Span, ...]]) -> tuple[Span, ...]:
    """The bytes that are in each of several sets of disjoint spans; none without a set."""
    found, *others = tuple(sets) or ((),)
    for other in others:
        found = tuple(intersection(found, other))
    return found


def minus(spans: Iterable[Range], others: Sequence[Range]) -> Iterator[Span]:
    """The parts of each span that lie outside ``others``, which are disjoint."""
    for start, end in spans:
        for first, last in intersection([(start, end)], others):
            if start < first:
                yield Span(start, first)
            start = last
        if start < end:
            yield Span(start, end)


def covers(spans: Sequence[Range], start: int, end: int) -> bool:
    """Whether one of the disjoint spans holds all of ``[start, end)``."""
    at = bisect_right(spans, start, key=itemgetter(0)) - 1
    return at >= 0 and end <= spans[at][1]


def size(spans: Iterable[Range]) -> int:
    """The sum of their sizes."""
    return sum(end - start for start, end in spans)


def around(spans: Iterable[Range], page_size: int) -> tuple[Span, ...]:
    """The pages that hold a byte of the spans, disjoint."""
    return union(
        (start - start % page_size, round_up(end, page_size)) for start, end in spans if start < end
    )


def within(spans: Iterable[Range], page_size: int) -> Iterator[Span]:
    """The pages of each span that lie in it as a whole."""
    for start, end in spans:
        first, last = round_up(start, page_size), end - end % page_size
        if first < last:
            yield Span(first, last)


def pages_in_words(spans: Iterable[Range]) -> str:
    """The numbers of the whole pages in disjoint spans: ``12-40 57``."""
    pages = ((start // PAGE_SIZE, end // PAGE_SIZE - 1) for start, end in within(spans, PAGE_SIZE))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in pages)


def spans_of_pages(words: str) -> tuple[Span, ...]:
    """The spans of pages that ``pages_in_words`` wrote.

    Raises:
        ValueError: a word is no number, and no two with a hyphen.
    """
    pages = (word.partition("-") for word in words.split())
    return union(
        (int(first) * PAGE_SIZE, (int(last or first) + 1) * PAGE_SIZE) for first, _, last in pages
    )


def round_up(offset: int, page_size: int) -> int:
    """The first border of pages that isn't before ``offset``."""
    return -(-offset // page_size) * page_size
