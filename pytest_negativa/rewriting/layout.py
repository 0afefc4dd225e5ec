"""New files as ranges of an old file and edits; how they are written, checked and copied.

Edits are the bytes that change while a size stays, sorted and disjoint. They are made from maps and
plans without touching a file, and describe a library or an unpacked cubin. Those of several sources
are merged before they are written.

A copy of the same size is one range and its edits, and gets its name after it has been read back
and compared. A compacted file has a range for each run of pages that stay, and patches for its new
tables. The original is only read.
"""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.spans import MovedSpan, Span, around, intersection, minus, union
from pytest_negativa.storage.atomic import NewFile


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
STEP = 512 << 10
"""Bytes in one go. Buffers that fit a processor's cache take half the time."""
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


@dataclass
class _Writer:
    _layout: FileLayout
    _source: ByteSource
    _target: int
    _should_stop: Callable[[], bool]
    _in_kernel: bool

    def write(self) -> None:
        edits = self._layout.edits
        os.ftruncate(self._target, edits.size)
        for start, end, target in _unfilled(self._layout, self._source.size):
            self._copy(start, end, target)
        for change in edits.changes:
            for start in range(change.start, change.end, STEP):
                self._put(change.content(start, min(start + STEP, change.end)), start)

    def _copy(self, start: int, end: int, target: int) -> None:
        if self._in_kernel and end - start >= _SMALL_RANGE:
            done = self._copy_in_kernel(start, end, target)
            start, target = start + done, target + done
        while start < end:
            data = self._source.read(start, min(end - start, STEP))
            self._put(data, target)
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

    def _put(self, data: bytes, offset: int) -> None:
        if self._should_stop():
            raise StoppedError
        left = memoryview(data)
        while left:
            done = os.pwrite(self._target, left, offset)
            left = left[done:]
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


def write_copy(
    original: LibraryIdentity,
    target: Path,
    edits: Edits,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    hashed: FileState | None = None,
) -> tuple[str, FileState, FileState]:
    """Write ``original`` with ``edits`` to ``target``, replacing what was there.

    The copy has the original's permissions without setuid, setgid and the sticky bit. Its times are
    those of the writing.

    Args:
        original: the library and the digest of its bytes.
        target: the copy; its folder must exist.
        edits: what differs from the original.
        should_stop: asked before each step.
        hashed: the original's state when the digest was made. In this state it is not hashed again.

    Returns:
        The copy's SHA-256 in hex, and the states of copy and original when the copy was checked.

    Raises:
        StaleLibraryError: the original is not the file that was analyzed.
        FormatError: the original can't be read.
        ReconstructError: the copy can't be written or is wrong.
        StoppedError: ``should_stop`` returned true.
    """
    with refusing(target, "written", ReconstructError), ByteSource(original.path) as source:
        check_size(source, original)
        # Taken before the file is read: a later write makes another state.
        state = state_of(source.fileno())
        # A link at the target is replaced; the file it leads to stays.
        if not target.is_symlink() and target.exists() and target.samefile(source.path):
            raise ReconstructError(f"{target}: is the original itself")
        with NewFile(target) as new:
            try:
                write_layout(FileLayout.of_copy(edits), source, new.fd, should_stop)
                of_original = None if state == hashed else hashlib.sha256()
                sha256 = _check(source, new.path, edits, original, of_original, should_stop)
            except FormatError as e:
                if source.is_unchanged():
                    raise
                problem = "changed since it was traced: it got shorter while it was copied"
                raise StaleLibraryError(
                    f"{source.path} {problem}; run pytest --negativa again"
                ) from e
            os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
            new.publish()
            return sha256, state_of(new.fd), state


def check_digest(original: LibraryIdentity) -> FileState:
    """Hash an original, compare it with the digest that was analyzed, and return its state.

    Raises:
        StaleLibraryError: the file is not the one that was analyzed.
        FormatError: the file can't be read.
    """
    with ByteSource(original.path) as source:
        check_size(source, original)
        state = state_of(source.fileno())
        check_sha256(original, source.sha256())
        return state


def check_size(source: ByteSource, original: LibraryIdentity) -> None:
    """Refuse an original if its size differs from the analyzed file's, or if no digest is known.

    Raises:
        StaleLibraryError: the file is another one, or nothing shows that it is the same.
    """
    if original.sha256 is None:
        raise StaleLibraryError(
            f"{original.path}: its digest isn't known, because it changed while it was read, or "
            "an earlier release read it; run pytest --negativa again"
        )
    if source.size != original.size:
        raise StaleLibraryError(
            f"{original.path} changed since it was traced: {source.size:,} bytes, expected "
            f"{original.size:,}; run pytest --negativa again"
        )


def check_sha256(original: LibraryIdentity, found: str) -> None:
    """Refuse an original if its SHA-256 in hex differs from the analyzed file's.

    Raises:
        StaleLibraryError: the file is another one.
    """
    if found != original.sha256:
        raise StaleLibraryError(
            f"{original.path} changed since it was traced: sha256 {found}, expected "
            f"{original.sha256}; run pytest --negativa again"
        )


def state_of(file: int | str | os.PathLike[str]) -> FileState:
    """The state of a file, given its descriptor or its path.

    Raises:
        OSError: the file can't be found.
    """
    return FileState.of(os.stat(file))  # noqa: PTH116 (takes open files, too)


def state_at(path: Path) -> FileState | None:
    """The state of a file or link; None if there is none.

    Raises:
        OSError: nothing tells.
    """
    try:
        return FileState.of(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check(
    source: ByteSource,
    target: Path,
    edits: Edits,
    original: LibraryIdentity,
    of_original: hashlib._Hash | None,
    should_stop: Callable[[], bool],
) -> str:
    """Compare the copy with the original, which is edited again in memory; return the digest.

    One pass reads both files. The check shares only the edits with the writer.
    """
    of_copy = hashlib.sha256()
    fault: int | None = None
    with ByteSource(target) as copy:
        if copy.size != edits.size:
            raise ReconstructError(
                f"{original.path}: its copy has {copy.size:,} bytes, not {edits.size:,}"
            )
        for start in range(0, copy.size, STEP):
            if should_stop():
                raise StoppedError
            end = min(start + STEP, copy.size)
            wanted, found = source.read(start, end - start), copy.read(start, end - start)
            if of_original is not None:
                of_original.update(wanted)
            of_copy.update(found)
            if fault is None and edits.applied_to(wanted, start) != found:
                fault = start
    # If the files differ, a changed original is the likelier cause.
    if of_original is not None:
        check_sha256(original, of_original.hexdigest())
    elif not source.is_unchanged():
        raise StaleLibraryError(
            f"{original.path} changed while it was copied; run pytest --negativa again"
        )
    if fault is not None:
        raise ReconstructError(
            f"{original.path}: its copy reads back wrong, in the {STEP:,} bytes from offset "
            f"{fault:#x}; is the disk sound?"
        )
    return of_copy.hexdigest()
