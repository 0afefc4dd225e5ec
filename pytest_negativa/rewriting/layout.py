"""Describes a new file as ranges of an old file and edits, and writes such files.

Edits are the bytes that change while a size stays, sorted and disjoint. They are made from maps and
plans without touching a file, and describe a library or an unpacked cubin. Those of several sources
are merged before they are written.

A copy of the same size is one range and its edits. A compacted file has a range for each run of
pages that stay, and patches for its new tables.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import MovedSpan, Span, around, intersection, minus, union


@dataclass(frozen=True, slots=True)
class Fill:
    """The bytes at file offsets ``[start, end)`` all become ``value`` (0 to 255)."""

    start: int
    end: int
    value: int

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
    def filled(self) -> tuple[Span, ...]:
        """The filled spans; neighbours are one span."""
        return union((fill.start, fill.end) for fill in self.fills)

    def overlapping(self, start: int, end: int) -> Iterator[Change]:
        """The changes that have bytes at file offsets ``[start, end)``, by offset."""
        at = bisect_right(self.changes, start, key=attrgetter("end"))
        while at < len(self.changes) and self.changes[at].start < end:
            yield self.changes[at]
            at += 1

    def applied_to(self, data: bytes, offset: int) -> bytes | bytearray:
        """``data``, which begins at ``offset`` of the file, after the changes."""
        data_end = offset + len(data)
        changed: bytes | bytearray = data
        for change in self.overlapping(offset, data_end):
            # Most parts of a file have no change, and are not copied.
            changed = changed if isinstance(changed, bytearray) else bytearray(data)
            start, end = max(change.start, offset), min(change.end, data_end)
            changed[start - offset : end - offset] = change.content(start, end)
        return changed


def merge_edits(first: Edits, *others: Edits) -> Edits:
    """The edits of several sources, for one file, as one.

    Raises:
        ValueError: two change the same byte.
    """
    return Edits.of(first.size, (c for edits in (first, *others) for c in edits.changes))


# Bytes. File systems that copy on write share whole blocks; see copy_file_range(2).
_BLOCK = 4096
# Bytes that are read or written in one go.
_STEP = 512 << 10
# Bytes that the kernel copies between two looks at whether to stop.
_LARGE_STEP = 16 << 20
# Copying fewer bytes inside the kernel costs more than reading and writing them.
_SMALL_RANGE = 64 << 10


class StoppedError(Exception):
    """The caller of the writer wants the file no longer."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The parts of a new file.

    Attributes:
        copies: ranges of the old file. Behind the old file's end, and between the ranges, are
            zeros.
        edits: what changes after that, in offsets of the new file; also tells its size.
    """

    copies: tuple[MovedSpan, ...]
    edits: Edits

    @classmethod
    def of_copy(cls, edits: Edits) -> FileLayout:
        """A copy of the same size."""
        return cls((MovedSpan(0, edits.size, 0),), edits)


class LayoutBuilder:
    """Puts a new file together, from front to back.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._copies: list[MovedSpan] = []
        self._changes: list[Change] = []

    def append(self, data: bytes, alignment: int = 1) -> int:
        """Append new bytes, and return their offset."""
        start = self._align(alignment)
        self._changes.append(Patch(start, data))
        self.size += len(data)
        return start

    def append_copy(self, start: int, end: int, alignment: int = 1) -> int:
        """Append bytes ``[start, end)`` of the old file, and return their new offset."""
        target = self._align(alignment)
        self._copies.append(MovedSpan(start, end, target))
        self.size += end - start
        return target

    def change(self, change: Change) -> None:
        """Change copied bytes; in offsets of the new file."""
        self._changes.append(change)

    def build(self) -> FileLayout:
        """The layout.

        Raises:
            ValueError: changes overlap.
        """
        return FileLayout(tuple(self._copies), Edits.of(self.size, self._changes))

    def _align(self, alignment: int) -> int:
        self.size = -(-self.size // alignment) * alignment
        return self.size


def write_layout(
    layout: FileLayout,
    source: ByteSource,
    target: int,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    copy_in_kernel: bool = True,
) -> None:
    """Write a new file. Blocks that are filled are not copied first.

    Args:
        layout: what to write.
        source: the old file.
        target: descriptor of the new file: empty, open for reading and writing.
        should_stop: asked before each step.
        copy_in_kernel: let the kernel copy if it can.

    Raises:
        OSError: the new file can't be written.
        FormatError: the old file can't be read, or got shorter.
        StoppedError: ``should_stop`` returned true.
    """
    _Writer(layout, source, target, should_stop, copy_in_kernel).write()


class _Writer:
    def __init__(
        self,
        layout: FileLayout,
        source: ByteSource,
        target: int,
        should_stop: Callable[[], bool],
        copy_in_kernel: bool,
    ) -> None:
        self._layout = layout
        self._source = source
        self._target = target
        self._should_stop = should_stop
        self._in_kernel = copy_in_kernel

    def write(self) -> None:
        edits = self._layout.edits
        os.ftruncate(self._target, edits.size)
        for start, end, target in _unfilled(self._layout, self._source.size):
            self._copy(start, end, target)
        for change in edits.changes:
            if isinstance(change, Patch):
                self._put(memoryview(change.data), change.start)
            else:
                self._fill(change)

    def _copy(self, start: int, end: int, target: int) -> None:
        if self._in_kernel and end - start >= _SMALL_RANGE:
            done = self._copy_in_kernel(start, end, target)
            start, target = start + done, target + done
        while start < end:
            data = self._source.read(start, min(end - start, _STEP))
            self._put(memoryview(data), target)
            start, target = start + len(data), target + len(data)

    def _copy_in_kernel(self, start: int, end: int, target: int) -> int:
        """Copy as much as the kernel can, and return the number of bytes."""
        position = start
        while position < end:
            if self._should_stop():
                raise StoppedError
            length = min(end - position, _LARGE_STEP)
            try:
                done = os.copy_file_range(
                    self._source.fileno(), self._target, length, position, target
                )
            except OSError:
                # Not between these file systems; reading and writing report any other error.
                self._in_kernel = False
                break
            if done == 0:
                # Either the end of the file, which reading then reports, or a kernel before 5.19.
                break
            position, target = position + done, target + done
        return position - start

    def _fill(self, fill: Fill) -> None:
        pattern = memoryview(fill.content(0, min(fill.end - fill.start, _STEP)))
        for start in range(fill.start, fill.end, _STEP):
            self._put(pattern[: fill.end - start], start)

    def _put(self, data: memoryview, offset: int) -> None:
        if self._should_stop():
            raise StoppedError
        while data:
            done = os.pwrite(self._target, data, offset)
            data = data[done:]
            offset += done


def _unfilled(layout: FileLayout, old_size: int) -> Iterator[MovedSpan]:
    """The ranges to copy: without filled blocks, and up to the old file's end."""
    for start, end, target in layout.copies:
        shift = target - start
        whole = [(start, min(end, old_size))] if start < old_size else []
        changes = layout.edits.overlapping(target, end + shift)
        filled = [(c.start - shift, c.end - shift) for c in changes if isinstance(c, Fill)]
        for span in intersection(around(minus(whole, filled), _BLOCK), whole):
            yield MovedSpan(*span, span.start + shift)
