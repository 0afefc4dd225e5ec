"""The bytes of a file that change while its size stays, sorted and disjoint.

Edits are made from maps and plans without touching a file. Edits of several sources are merged
before they are written. They describe a library, or an unpacked cubin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from pytest_negativa.models.spans import Span, union


@dataclass(frozen=True, slots=True)
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

    def content(self, start: int, end: int) -> bytes:
        """The new bytes at file offsets ``[start, end)``, which lie within the change."""
        return bytes([self.value]) * (end - start)

    def is_zero(self, start: int, end: int) -> bool:
        """Whether all new bytes at ``[start, end)`` are zeros."""
        return self.value == 0 or start == end

    def moved(self, start: int, end: int, target: int) -> Fill:
        """The part at ``[start, end)``, for another file that has it at ``target``."""
        return Fill(target, target + end - start, self.value)


@dataclass(frozen=True, slots=True)
class Patch:
    """The bytes from file offset ``start`` on become ``data``."""

    start: int
    data: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or not self.data:
            raise ValueError(f"bad patch of {len(self.data)} bytes at {self.start:#x}")

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def content(self, start: int, end: int) -> bytes:
        """The new bytes at file offsets ``[start, end)``, which lie within the change."""
        return self.data[start - self.start : end - self.start]

    def is_zero(self, start: int, end: int) -> bool:
        """Whether all new bytes at ``[start, end)`` are zeros."""
        return not any(self.content(start, end))

    def moved(self, start: int, end: int, target: int) -> Patch:
        """The part at ``[start, end)``, for another file that has it at ``target``."""
        return Patch(target, self.content(start, end))


Change = Fill | Patch


@dataclass(frozen=True, slots=True)
class Edits:
    """All changes of a file that keeps its size.

    Raises:
        ValueError: changes are out of order, overlap, or end behind the file.

    Attributes:
        size: bytes of the file.
        changes: by offset; no byte is in two of them.
    """

    size: int
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        start = end = 0
        for change in self.changes:
            if change.start < start:
                raise ValueError(f"edits not in order: {change.start:#x} is too late")
            if change.start < end:
                raise ValueError(f"edits overlap at {change.start:#x}")
            start, end = change.start, change.end
        if end > self.size:
            raise ValueError(f"an edit ends at {end:#x}, the file at {self.size:#x}")

    @classmethod
    def of(cls, size: int, changes: Iterable[Change]) -> Edits:
        """Edits from changes in any order.

        Raises:
            ValueError: see ``Edits``.
        """
        return cls(size, tuple(sorted(changes, key=attrgetter("start"))))

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The changes that fill spans."""
        return tuple(change for change in self.changes if isinstance(change, Fill))

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The changes that write new bytes."""
        return tuple(change for change in self.changes if isinstance(change, Patch))

    @property
    def filled(self) -> tuple[Span, ...]:
        """The filled spans; neighbours are one span."""
        return union((fill.start, fill.end) for fill in self.fills)

    def overlapping(self, start: int, end: int) -> Iterator[Change]:
        """The changes that have bytes at file offsets ``[start, end)``, by offset."""
        at = bisect_right(self.changes, start, key=attrgetter("end"))
        while at < len(self.changes) and self.changes[at].start < end:
            yield self.changes[at]
            at += 1

    def apply(self, window: bytearray, offset: int = 0) -> None:
        """Make the changes in ``window``, which holds the bytes of the file from ``offset`` on."""
        window_end = offset + len(window)
        for change in self.overlapping(offset, window_end):
            start, end = max(change.start, offset), min(change.end, window_end)
            window[start - offset : end - offset] = change.content(start, end)

    def applied_to(self, data: bytes, offset: int) -> bytes | bytearray:
        """``data``, which begins at ``offset`` of the file, after the changes."""
        if next(self.overlapping(offset, offset + len(data)), None) is None:
            return data
        window = bytearray(data)
        self.apply(window, offset)
        return window

    def __bool__(self) -> bool:
        return bool(self.changes)


def merge_edits(first: Edits, *others: Edits) -> Edits:
    """The edits of several sources, for one file, as one.

    Raises:
        ValueError: they are for files of different sizes, or two change the same byte.
    """
    for other in others:
        if other.size != first.size:
            raise ValueError(f"edits for files of {first.size} and {other.size} bytes")
    return Edits.of(first.size, (c for edits in (first, *others) for c in edits.changes))
