"""Files in the page cache: taken out, brought in, counted."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path


def files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def drop(*folders: Path) -> None:
    """Drop files from the page cache, but for pages that a process has mapped."""
    os.sync()
    for path in files(*folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(*folders: Path) -> float:
    """MB that the page cache has of files, by cachestat(2) of Linux 6.5."""
    call, all_of_it, found = ctypes.CDLL(None).syscall, (ctypes.c_uint64 * 2)(), 0
    for path in files(*folders):
        state = (ctypes.c_uint64 * 5)()
        with path.open("rb") as file:
            if call(451, file.fileno(), all_of_it, state, 0):
                return float("nan")
        found += state[0] * 4096
    return found / 1e6


def warm(*folders: Path) -> None:
    for path in files(*folders):
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
