"""Which bytes of files are in the page cache, and getting them out. Without privileges."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
# asm-generic/unistd.h; the same number on all architectures. Since Linux 6.5.
_SYS_CACHESTAT = 451
_WINDOW = 1 << 30


class _Range(ctypes.Structure):
    """struct cachestat_range of linux/mman.h; length 0: to the end."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    """struct cachestat of linux/mman.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, as far as nobody has them mapped.

    posix_fadvise(2), POSIX_FADV_DONTNEED: pages that are written out, mapped by no process and
    not locked.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # A copy may just have been made.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of files in the page cache, in whole pages; None if the system doesn't tell.

    For files that the user neither owns nor may write, kernels since 5.2 don't.
    """
    total = 0
    for path in paths:
        pages = _cached_pages(path)
        if pages is None:
            return None
        total += pages * _PAGE
    return total


def _cached_pages(path: Path) -> int | None:
    try:
        with path.open("rb", buffering=0) as file:
            if not (os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid()):
                return None
            size = os.fstat(file.fileno()).st_size
            pages = _by_cachestat(file.fileno())
            return pages if pages is not None else _by_mincore(file.fileno(), size)
    except OSError:
        return None


def _by_cachestat(fd: int) -> int | None:
    found = _Statistics()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(_Range(0, 0)), ctypes.byref(found), 0
    )
    return int(found.cached) if done == 0 else None


def _by_mincore(fd: int, size: int) -> int | None:
    """mincore(2) over a mapping of the file, which by itself reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for start in range(0, size, _WINDOW):
        length = min(_WINDOW, size - start)
        # Private and writable, so that ctypes may take its address; nothing is written.
        with mmap.mmap(
            fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        ) as mapping:
            flags = (ctypes.c_ubyte * -(-length // _PAGE))()
            first = ctypes.c_ubyte.from_buffer(mapping)
            failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(length), flags)
            del first
            if failed:
                return None
            # The lowest bit tells; the others are reserved.
            pages += sum(flag & 1 for flag in bytes(flags))
    return pages
