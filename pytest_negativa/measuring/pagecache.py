"""The page cache of files: how much is cached, and eviction. It needs no privileges."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
# asm-generic/unistd.h; the same number on all architectures. Since Linux 6.5.
_SYS_CACHESTAT = 451


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
    """Drop files from the page cache, except for pages that a process has mapped.

    posix_fadvise(2), POSIX_FADV_DONTNEED: pages that are written out, mapped by no process and
    not locked.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # A copy may just have been made.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of files in the page cache, in whole pages, by cachestat(2).

    None if the kernel is older than 6.5, or the user neither owns a file nor may write it.
    """
    pages = [_cached_pages(path) for path in paths]
    return None if None in pages else sum(p for p in pages if p is not None) * _PAGE


def _cached_pages(path: Path) -> int | None:
    found = _Statistics()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with path.open("rb", buffering=0) as file:
            failed = libc.syscall(
                ctypes.c_long(_SYS_CACHESTAT),
                file.fileno(),
                ctypes.byref(_Range(0, 0)),
                ctypes.byref(found),
                0,
            )
    except OSError:
        return None
    return None if failed else int(found.cached)
