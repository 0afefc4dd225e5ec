"""Checked reads of a file; what is packed in an archive goes to TMPDIR, without a name.

``pread`` and not ``mmap``: mapped pages would count as memory of this process (540 MB of RSS for a
library of 540 MB). Truncating the file meanwhile would raise SIGBUS instead of an error.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import stat
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, TypeVar

from pytest_negativa.errors import FormatError
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.file_state import FileState
from pytest_negativa.storage.system import HASH_STEP, hash_steps

_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


# Bytes. A region's header with the headers of its first elements, or one with its names.
_AHEAD = 512


class Readable(Protocol):
    """Bytes of a library by offset, or by address; ``path`` is for messages."""

    path: str

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``offset``.

        Raises:
            FormatError: they are not all there.
        """
        ...

    def next_stored(self, offset: int) -> tuple[int, int] | None:
        """The first range at or behind ``offset`` that lies in the file; the rest is zeros."""
        ...


class ReadAhead:
    """A ``Readable`` for small reads that mostly go forward: headers, one behind the other.

    Args:
        source: what is read.
        end: nothing from there on is read without need.
    """

    def __init__(self, source: Readable, end: int) -> None:
        self.path = source.path
        self.next_stored = source.next_stored
        self._read = source.read
        self._end = end
        self._base = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """See ``Readable``."""
        at = offset - self._base
        if at < 0 or at + length > len(self._data):
            self._data = self._read(offset, max(length, min(_AHEAD, self._end - offset)))
            self._base, at = offset, 0
        return self._data[at : at + length]


class ByteSource:
    """A regular file, open for reading.

    Args:
        path: the file.
        descriptor: of the file if it is open, and ``path`` is for messages. It gets closed.

    Attributes:
        path: real path.
        size: bytes.
        start: of a window, where it begins in the file.
        mtime_ns: modification time, ns since the epoch.
        state: tells whether the file changed.

    Raises:
        FormatError: not a regular file, or it can't be opened or read.
    """

    start = 0

    def __init__(self, path: str | os.PathLike[str], descriptor: int | None = None) -> None:
        self.path, self._opened = os.fspath(path), f"/proc/self/fd/{descriptor}"
        try:
            if descriptor is None:
                self.path = self._opened = os.path.realpath(path)
                # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise FormatError(path, None, f"cannot be opened: {e.strerror}") from e
        self._fd = descriptor
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            found = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "a special file")
            raise FormatError(path, None, f"is {found}, expected a regular file")
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self.state = FileState.of(status)

    def fileno(self) -> int:
        """The file descriptor; it is for reading only."""
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``offset``.

        Raises:
            FormatError: the range leaves the file, or the file got shorter meanwhile.
        """
        self._check_range(offset, length)
        start = self.start + offset
        try:
            data = os.pread(self._fd, length, start)
            # One pread returns at most 2 GiB - 4 KiB, see pread(2).
            while len(data) < length and (
                more := os.pread(self._fd, length - len(data), start + len(data))
            ):
                data += more
        except OSError as e:
            raise FormatError(self.path, offset, f"cannot be read: {e.strerror}") from e
        if len(data) != length:
            raise FormatError(
                self.path,
                offset,
                f"{length:#x} bytes wanted, {len(data):#x} left: it was truncated",
            )
        return data

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(
                self.path,
                offset,
                f"{length:#x} bytes wanted, but the file ends at {self.size:#x}; is it truncated?",
            )

    def next_stored(self, offset: int) -> tuple[int, int] | None:
        """The rest of the file; see ``Readable``."""
        return (offset, self.size) if offset < self.size else None

    def sha256(self) -> str:
        """Hex digest of the whole file.

        Raises:
            FormatError: it can't be read, or got shorter meanwhile.
        """
        digest = hash_steps(self.read, self.size)
        assert digest is not None  # read() raises.
        return digest

    def is_unchanged(self) -> bool:
        """Whether the path still names the file that was opened, and no write changed it since."""
        try:
            return self.state == FileState.of(Path(self._opened).stat())
        except OSError:
            return False

    def window(self, start: int, size: int) -> ByteSource:
        """A part of the file, such as a member of an archive, with offsets of its own.

        It shares the descriptor, which either closes.

        Raises:
            FormatError: it leaves the file.
        """
        self._check_range(start, size)
        part = copy.copy(self)
        part.size, part.start = size, self.start + start
        return part

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def unpack_stream(path: str, stream: io.BufferedIOBase | IO[bytes], size: int) -> ByteSource:
    """A file of an archive, unpacked to a file without a name.

    Args:
        path: for messages.
        stream: its content.
        size: bytes that there must be.

    Raises:
        FormatError: it has another size, or there is no room.
    """
    problem = "cannot be unpacked to the folder for temporary files"
    with contextlib.ExitStack() as closing:
        try:
            file = closing.enter_context(tempfile.TemporaryFile())
        except OSError as e:
            raise FormatError(path, None, f"{problem}: {e.strerror}; set TMPDIR") from e
        while data := stream.read(HASH_STEP):
            try:
                file.write(data)
                file.flush()
            except OSError as e:
                reason = f"{problem}: {e.strerror}; set TMPDIR to another one"
                raise FormatError(path, None, reason) from e
        if file.tell() != size:
            raise FormatError(path, None, "has not the size that the archive says; damaged")
        source = ByteSource(path, os.dup(file.fileno()))
    source.mtime_ns = 0
    return source


def open_source(where: Path | Member) -> ByteSource:
    """Open a library for reading; in place, unless it is deflated in an archive.

    Raises:
        FormatError: it can't be opened, is damaged, or there is no room to unpack it.
    """
    if isinstance(where, Path):
        return ByteSource(where)
    with contextlib.ExitStack() as closing:
        archive = closing.enter_context(ByteSource(where.archive))
        part = archive.window(where.start, where.packed_size)
        part.path = str(where.path)
        if where.crc is None:
            closing.pop_all()
            return part
        unpacked = _inflate(part, where)
    # Whether it changes, the archive tells.
    unpacked.mtime_ns, unpacked.state = archive.mtime_ns, archive.state
    unpacked._opened = archive._opened
    return unpacked


def opened(
    file: str | os.PathLike[str] | ByteSource,
) -> contextlib.AbstractContextManager[ByteSource]:
    """A file, open for reading. One that was open before stays so.

    Raises:
        FormatError: it can't be opened.
    """
    return contextlib.nullcontext(file) if isinstance(file, ByteSource) else ByteSource(file)


def _inflate(part: ByteSource, member: Member) -> ByteSource:
    import zipfile  # It takes 5 ms.

    info = zipfile.ZipInfo(member.name)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.compress_size, info.file_size = member.packed_size, member.size
    info.CRC = member.crc or 0
    try:
        with open(part.fileno(), "rb", closefd=False) as packed:
            packed.seek(member.start)
            # It stops at the size that the archive says, and compares the checksum.
            return unpack_stream(part.path, zipfile.ZipExtFile(packed, "r", info), member.size)
    except (EOFError, zlib.error, zipfile.BadZipFile) as e:
        raise FormatError(part.path, None, f"cannot be unpacked: {e}; damaged") from e
    except OSError as e:
        raise FormatError(part.path, None, f"cannot be read: {e.strerror}") from e


_Fact = TypeVar("_Fact")


def read_fact(path: str | os.PathLike[str], read: Callable[[ByteSource], _Fact]) -> _Fact | None:
    """The result of ``read`` for a file; None if the file can't be read, or is damaged."""
    try:
        with ByteSource(path) as source:
            return read(source)
    except FormatError:
        return None


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file, in hex; None if it can't be read."""
    return read_fact(path, ByteSource.sha256)
