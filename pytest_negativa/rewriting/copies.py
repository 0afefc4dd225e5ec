"""A library and its edits to a checked copy. The original is only ever read.

The copy is written to a file without a name (``O_TMPFILE``), so that a process killed on the
way leaves nothing; where the file system can't do that, to a hidden one beside the target. It
gets its name when it has been read back and compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.rewriting.edits import Edits, Fill, Patch
from pytest_negativa.storage.atomic import TEMPORARY_SUFFIX

# linux/fs.h: _IOW(0x94, 9, int), the same on all architectures with 64-bit little-endian hosts.
_FICLONE = 0x40049409
# What fits a processor's cache is hashed and compared in half the time.
_STEP = 512 << 10
# In between, whoever wants to stop is heard.
_LARGE_STEP = 16 << 20
# Copying a smaller range inside the kernel costs more than reading and writing it.
_SMALL_RANGE = 64 << 10
# What file systems say that can't do it for these two files, see the manual pages.
_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM}
# A kernel or file system without O_TMPFILE opens the folder itself, which is an error.
_TMPFILE = os.O_TMPFILE
_CANNOT_TMPFILE = {errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT}


_SHORTER = "{} got shorter while it was copied; run pytest --negativa again"


class StoppedError(Exception):
    """Whoever asked for the copy wants it no longer."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """A copy as it was checked: digest in hex, and the states of both files."""

    sha256: str
    copy: FileState
    original: FileState


def write_copy(
    original: LibraryIdentity,
    target: Path,
    edits: Edits,
    should_stop: Callable[[], bool] = lambda: False,
) -> CopyFacts:
    """Write ``original`` with ``edits`` to ``target``, replacing what was there.

    Permissions are kept, but for those that lend the owner's rights; times are those of the
    writing. The folder of ``target`` must exist.

    Raises:
        StaleLibraryError: the original is not the file that was analyzed.
        ReconstructError: it can't be read, the copy can't be written or is not what it should be.
        StoppedError: ``should_stop`` said so.
    """
    if original.sha256 is None:
        raise StaleLibraryError(
            f"{original.path}: its digest isn't known, for it changed while it was read or was "
            "read by an earlier release; run pytest --negativa again"
        )
    try:
        with ByteSource(original.path) as source:
            _check_size(source, original)
            # From before it is read: who writes to it from here on makes another state.
            state = state_of(source.fileno())
            # A link would be replaced, and what it leads to stay.
            if not target.is_symlink() and target.exists() and target.samefile(source.path):
                raise ReconstructError(f"{target}: is the original itself")
            with _NewFile(target) as new:
                _Writer(source, new.fd, should_stop).write(edits)
                sha256 = _check(source, new.fd, edits, original, should_stop)
                os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
                new.publish()
                return CopyFacts(sha256, copy=state_of(new.fd), original=state)
    except FormatError as e:
        raise ReconstructError(str(e)) from e
    except OSError as e:
        raise ReconstructError(f"{target}: cannot be written: {e.strerror}") from e


def check_digest(original: LibraryIdentity) -> FileState:
    """The state of an original that has been hashed and found to be what was analyzed.

    Raises:
        StaleLibraryError: it is not the file that was analyzed.
        ReconstructError: it can't be read.
    """
    try:
        with ByteSource(original.path) as source:
            _check_size(source, original)
            state = state_of(source.fileno())
            if (found := source.sha256()) != original.sha256:
                raise _stale(original, found)
            return state
    except FormatError as e:
        raise ReconstructError(str(e)) from e


def state_of(file: int | str | os.PathLike[str]) -> FileState:
    """The state of a file, open or by its path.

    Raises:
        OSError: it can't be found.
    """
    status = os.stat(file)  # noqa: PTH116 (takes open files, too)
    return FileState(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        device=status.st_dev,
    )


def remove_abandoned(target: Path) -> None:
    """Remove what writers of ``target`` left that were killed. None may be at work."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent):
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(TEMPORARY_SUFFIX):
                Path(entry.path).unlink()


class _NewFile:
    """A file that gets its name when it is complete, or leaves nothing."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._name: Path | None = None
        try:
            self.fd = os.open(target.parent, _TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            if e.errno not in _CANNOT_TMPFILE:
                raise
            self.fd, name = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY_SUFFIX
            )
            self._name = Path(name)

    def publish(self) -> None:
        if self._name is None:
            # linkat(2) gives a name, but does not replace; its manual page tells this way in.
            random = os.urandom(6).hex()
            name = self._target.with_name(f".{self._target.name}.{random}{TEMPORARY_SUFFIX}")
            # With a folder given Python calls linkat, and that follows the link.
            os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=self.fd, follow_symlinks=True)
            self._name = name
        self._name.replace(self._target)
        self._name = None

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.fd)
        if self._name is not None:
            with contextlib.suppress(OSError):
                self._name.unlink()


class _Writer:
    """Writes a copy: what is filled is not copied first, unless copying costs nothing."""

    def __init__(self, source: ByteSource, target: int, should_stop: Callable[[], bool]) -> None:
        self._source = source
        self._target = target
        self._should_stop = should_stop
        self._copies_in_kernel = True

    def write(self, edits: Edits) -> None:
        cloned = self._clone()
        position = 0
        for fill in edits.fills:
            if not cloned:
                self._copy(position, fill.start)
            self._fill(fill)
            position = fill.end
        if not cloned:
            self._copy(position, edits.size)
        for patch in edits.patches:
            self._put(memoryview(patch.data), patch.offset)

    def _clone(self) -> bool:
        """Share the original's blocks, on file systems that copy on write."""
        try:
            fcntl.ioctl(self._target, _FICLONE, self._source.fileno())
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            return False
        return True

    def _copy(self, start: int, end: int) -> None:
        if self._copies_in_kernel and end - start >= _SMALL_RANGE:
            start = self._copy_in_kernel(start, end)
        while start < end:
            if not (data := os.pread(self._source.fileno(), min(end - start, _STEP), start)):
                raise StaleLibraryError(_SHORTER.format(self._source.path))
            self._put(memoryview(data), start)
            start += len(data)

    def _copy_in_kernel(self, start: int, end: int) -> int:
        """Copy as much as the kernel can; returns where that ends."""
        while start < end:
            if self._should_stop():
                raise StoppedError
            length = min(end - start, _LARGE_STEP)
            try:
                done = os.copy_file_range(self._source.fileno(), self._target, length, start, start)
            except OSError as e:
                if e.errno not in _CANNOT:
                    raise
                self._copies_in_kernel = False
                return start
            if done == 0:
                # The end of the file, which reading finds out, or a kernel before 5.19.
                return start
            start += done
        return start

    def _fill(self, fill: Fill) -> None:
        pattern = memoryview(bytes([fill.value]) * min(fill.end - fill.start, _STEP))
        for start in range(fill.start, fill.end, _STEP):
            self._put(pattern[: fill.end - start], start)

    def _put(self, data: memoryview, offset: int) -> None:
        if self._should_stop():
            raise StoppedError
        while data:
            done = os.pwrite(self._target, data, offset)
            data = data[done:]
            offset += done


def _check(
    source: ByteSource,
    copy: int,
    edits: Edits,
    original: LibraryIdentity,
    should_stop: Callable[[], bool],
) -> str:
    """Compare the copy with the original, edited a second time in memory; returns its digest.

    One pass over both files. It shares nothing with the writer but the edits.
    """
    size = os.fstat(copy).st_size
    if size != edits.size:
        raise ReconstructError(f"{original.path}: its copy has {size:,} bytes, not {edits.size:,}")
    of_original = hashlib.sha256()
    # Up to the first edit the two are the same.
    of_copy = None
    fault: int | None = None
    editor = _Editor(edits)
    wanted, found = bytearray(_STEP), bytearray(_STEP)
    for start in range(0, size, _STEP):
        if should_stop():
            raise StoppedError
        length = min(_STEP, size - start)
        if length < _STEP:
            wanted, found = bytearray(length), bytearray(length)
        _read_into(source.fileno(), wanted, start, original.path)
        if of_copy is None and editor.edits_before(start + length):
            of_copy = of_original.copy()
        of_original.update(wanted)
        editor.apply(wanted, start)
        _read_into(copy, found, start, "the copy")
        if of_copy is not None:
            of_copy.update(found)
        # Two bytearrays, since comparing memoryviews goes byte by byte.
        if fault is None and wanted != found:
            fault = start
    # An original that changed is the likelier reason for a difference.
    if (digest := of_original.hexdigest()) != original.sha256:
        raise _stale(original, digest)
    if fault is not None:
        raise ReconstructError(
            f"{original.path}: its copy reads back wrong, in the {_STEP:,} bytes from offset "
            f"{fault:#x}; is the disk sound?"
        )
    return digest if of_copy is None else of_copy.hexdigest()


class _Editor:
    """Applies edits to windows of a file that come in order."""

    def __init__(self, edits: Edits) -> None:
        self._edits = tuple(edits.in_order())
        self._starts = [edit.start for edit in self._edits]
        self._next = 0

    def edits_before(self, offset: int) -> bool:
        return bool(self._starts) and self._starts[0] < offset

    def apply(self, window: bytearray, offset: int) -> None:
        """Edit what lies in ``window``, which begins at file ``offset``."""
        end = offset + len(window)
        last = bisect_right(self._starts, end - 1)
        with memoryview(window) as view:
            for edit in self._edits[self._next : last]:
                start, stop = max(edit.start, offset), min(edit.end, end)
                view[start - offset : stop - offset] = _content(edit, start, stop)
        # The last one may go on in the next window.
        self._next = last - 1 if last and self._edits[last - 1].end > end else last


def _content(edit: Fill | Patch, start: int, stop: int) -> bytes:
    if isinstance(edit, Patch):
        return edit.data[start - edit.offset : stop - edit.offset]
    return bytes([edit.value]) * (stop - start)


def _read_into(file: int, buffer: bytearray, offset: int, name: str) -> None:
    with memoryview(buffer) as view:
        done = 0
        while done < len(buffer):
            try:
                more = os.preadv(file, [view[done:]], offset + done)
            except OSError as e:
                raise ReconstructError(f"{name}: cannot be read: {e.strerror}") from e
            if more == 0:
                raise StaleLibraryError(_SHORTER.format(name))
            done += more


def _check_size(source: ByteSource, original: LibraryIdentity) -> None:
    if source.size != original.size:
        raise StaleLibraryError(
            f"{original.path} changed since it was traced: {source.size:,} bytes, expected "
            f"{original.size:,}; run pytest --negativa again"
        )


def _stale(original: LibraryIdentity, found: str) -> StaleLibraryError:
    return StaleLibraryError(
        f"{original.path} changed since it was traced: sha256 {found}, expected "
        f"{original.sha256}; run pytest --negativa again"
    )
