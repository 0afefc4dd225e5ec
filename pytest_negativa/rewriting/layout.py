"""Describes a new file as ranges of an old file and edits, and writes such files.

A copy of the same size is one range and its edits. A compacted file has a range for each run of
pages that stay, and patches for its new tables.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import MovedSpan, around, intersection, minus
from pytest_negativa.rewriting.edits import Change, Edits, Fill, Patch

# Bytes. File systems that copy on write share whole blocks; see copy_file_range(2).
_BLOCK = 4096
# Bytes that are read or written in one go.
_STEP = 512 << 10
# Bytes that the kernel copies between two looks at whether to stop.
_LARGE_STEP = 16 << 20
# Copying fewer bytes inside the kernel costs more than reading and writing them.
_SMALL_RANGE = 64 << 10
# The errors of file systems that can't copy between these two files, see copy_file_range(2); EBADF
# is what some that don't know the call answer.
_CANNOT = {
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM,
    errno.EBADF,
}  # fmt: skip


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
            except OSError as e:
                if e.errno not in _CANNOT:
                    raise
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
