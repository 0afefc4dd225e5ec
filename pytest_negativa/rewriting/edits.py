"""What is to be written over a library's bytes: known, sorted and disjoint before any is.

Edits are made from maps and plans without touching a file, by as many sources as there are
ways of rewriting, and merged before they are applied to a copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge
from itertools import chain, pairwise

from pytest_negativa.models.base import Span

_FILL = struct.Struct("<cQQB")
_PATCH = struct.Struct("<cQQ")


@dataclass(frozen=True, slots=True, order=True)
class Fill:
    """The bytes at file offsets ``[start, end)`` all become ``value`` (0 to 255)."""

    start: int
    end: int
    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"bad fill [{self.start:#x}, {self.end:#x})")
        if not 0 <= self.value <= 255:
            raise ValueError(f"fill value {self.value}, expected a byte")


@dataclass(frozen=True, slots=True, order=True)
class Patch:
    """The bytes from file ``offset`` on become ``data``."""

    offset: int
    data: bytes

    def __post_init__(self) -> None:
        if self.offset < 0 or not self.data:
            raise ValueError(f"bad patch of {len(self.data)} bytes at {self.offset:#x}")

    @property
    def start(self) -> int:
        return self.offset

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class Edits:
    """All that changes in a file; its size stays.

    Raises:
        ValueError: fills or patches out of order, overlapping, or past the end of the file.

    Attributes:
        size: bytes of the file that they are for.
        fills, patches: by offset; no byte is in two of them.
    """

    size: int
    fills: tuple[Fill, ...] = ()
    patches: tuple[Patch, ...] = ()

    def __post_init__(self) -> None:
        starts = ([f.start for f in self.fills], [p.start for p in self.patches])
        for before, after in chain.from_iterable(map(pairwise, starts)):
            if after < before:
                raise ValueError(f"edits not in order: {after:#x} is too late")
        end = 0
        for edit in self.in_order():
            if edit.start < end:
                raise ValueError(f"edits overlap at {edit.start:#x}")
            end = edit.end
        if end > self.size:
            raise ValueError(f"an edit ends at {end:#x}, the file at {self.size:#x}")

    @classmethod
    def of(cls, size: int, edits: Iterable[Fill | Patch]) -> Edits:
        """From edits in any order.

        Raises:
            ValueError: see ``Edits``.
        """
        fills: list[Fill] = []
        patches: list[Patch] = []
        for edit in edits:
            if isinstance(edit, Fill):
                fills.append(edit)
            else:
                patches.append(edit)
        return cls(size, tuple(sorted(fills)), tuple(sorted(patches)))

    def in_order(self) -> Iterable[Fill | Patch]:
        """Fills and patches together, by offset."""
        return merge(self.fills, self.patches, key=_start)

    @property
    def filled(self) -> tuple[Span, ...]:
        """The filled spans, neighbours as one."""
        spans: list[Span] = []
        for fill in self.fills:
            if spans and spans[-1].end == fill.start:
                spans[-1] = Span(spans[-1].start, fill.end)
            else:
                spans.append(Span(fill.start, fill.end))
        return tuple(spans)

    def digest(self) -> str:
        """SHA-256, in hex, that is equal for equal edits only."""
        parts = [_PATCH.pack(b"S", self.size, 0)]
        parts += [_FILL.pack(b"F", f.start, f.end, f.value) for f in self.fills]
        for patch in self.patches:
            parts += [_PATCH.pack(b"P", patch.offset, len(patch.data)), patch.data]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def __bool__(self) -> bool:
        return bool(self.fills or self.patches)


def merge_edits(first: Edits, *others: Edits) -> Edits:
    """The edits of several sources, for one file, as one.

    Raises:
        ValueError: they are for files of different sizes, or two change the same byte.
    """
    for other in others:
        if other.size != first.size:
            raise ValueError(f"edits for files of {first.size} and {other.size} bytes")
    every = (first, *others)
    return Edits(
        first.size,
        tuple(sorted(fill for edits in every for fill in edits.fills)),
        tuple(sorted(patch for edits in every for patch in edits.patches)),
    )


def _start(edit: Fill | Patch) -> int:
    return edit.start
