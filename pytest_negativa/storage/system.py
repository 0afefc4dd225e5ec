"""The operating system's functions, taken before tests replace them; memory reads, cores.

Tests replace ``open``, ``os.stat`` and whole file systems (monkeypatch, pyfakefs), and callbacks
of the driver run in the middle of such tests. This module takes the functions that a callback needs
once, at import. A class holds them, for such tools replace functions of modules.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from pytest_negativa.models.file_kinds import HEAD_SIZE

HASH_STEP = 256 << 10
"""Bytes. A step that fits a processor's cache is hashed fastest."""

_MAX_BYTES = 2 << 30
"""Of a record. The usage of 1,000 shards has 6 MB."""


class System:
    """The original functions. A namespace, never instantiated."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    read = staticmethod(os.read)
    pread = staticmethod(os.pread)
    write = staticmethod(os.write)
    stat = staticmethod(os.stat)
    fstat = staticmethod(os.fstat)
    readlink = staticmethod(os.readlink)
    getpid = staticmethod(os.getpid)
    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def read_all(path: str) -> bytes:
        """A file of ``/proc``, whose size is not known beforehand.

        Raises:
            OSError: it can't be opened or read.
        """
        fd = System.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := System.read(fd, 1 << 18):
                parts.append(part)
            return b"".join(parts)
        finally:
            System.close(fd)


_forks: list[None] = []
os.register_at_fork(after_in_child=partial(_forks.append, None))


def available_cores() -> int:
    """Number of cores that this process may use: of threads and processes, if no option says."""
    return len(os.sched_getaffinity(0))


def process_mark() -> tuple[int, int]:
    """Mark of a process, which its forked children lack: in a pid namespace one may have its id."""
    return System.getpid(), len(_forks)


class ProcessMemory:
    """Reads this process's memory at any address; a bad address yields no bytes, and no crash.

    ``/proc/self/mem`` has watched pages of GPU code, too, which the process itself may not read.
    Reading them touches nothing.
    """

    def read(self, address: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer where readable memory ends, none at a bad address."""
        if address <= 0 or length <= 0 or address + length >= 1 << 63:
            return b""
        try:
            fd = System.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            # The kernel copies page by page, and ends before the first that is not there.
            return System.pread(fd, length, address)
        except OSError:
            return b""
        finally:
            System.close(fd)

    def read_exactly(self, address: int, length: int) -> bytes | None:
        """``length`` bytes, or None."""
        data = self.read(address, length)
        return data if len(data) == length else None

    def read_string(self, address: int, limit: int = 1 << 16) -> bytes | None:
        """A NUL-terminated string without its end, or None; ``limit`` in bytes."""
        for size in (256, limit):  # Most are short.
            data = self.read(address, size)
            if (end := data.find(b"\0")) >= 0:
                return data[:end]
        return None


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a regular file to read it; a pipe, which might never end, is an error.

    Args:
        follow: whether ``path`` may be a link.

    Raises:
        OSError: it can't be opened, is no regular file, or is a link that is not to be followed.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as e:
        if e.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "a link, which is not followed", os.fspath(path)) from e
        raise
    try:
        file = os.fdopen(descriptor, "rb")
    except OSError:
        # Python refuses folders, and leaves them open.
        os.close(descriptor)
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file


def read_head(path: str | os.PathLike[str], size: int = HEAD_SIZE) -> bytes:
    """The first bytes of a file. A pipe that took its place since is not waited for.

    Raises:
        OSError: it can't be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def head_of(path: str | os.PathLike[str]) -> bytes:
    """The first bytes of a file, see ``read_head``; none if it can't be read."""
    try:
        return read_head(path)
    except OSError:
        return b""


def hash_steps(read: Callable[[int, int], bytes | None], size: int) -> str | None:
    """SHA-256 of so many bytes; None if they can't all be read.

    Args:
        read: reads from an offset, so many bytes.
    """
    digest = hashlib.sha256()
    for offset in range(0, size, HASH_STEP):
        data = read(offset, min(HASH_STEP, size - offset))
        if not data:
            return None
        digest.update(data)
    return digest.hexdigest()


def read_regular(
    path: str | os.PathLike[str], *, follow: bool = True, limit: int = _MAX_BYTES
) -> bytes:
    """All bytes of a regular file, see ``open_regular``.

    Args:
        path: the file.
        follow: whether ``path`` may be a link.
        limit: in bytes.

    Raises:
        OSError: it can't be opened or read, or is larger than the limit.
    """
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", os.fspath(path))
        return file.read()
