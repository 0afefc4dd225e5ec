"""Locks of files and folders between processes, by flock(2).

A lock ends with the process that holds it, however that ends, and leaves nothing behind. The
programs that the process starts don't get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def open_to_lock(path: Path, flags: int) -> Iterator[int]:
    """Open a file or a folder for ``lock``, and unlock it at the end.

    Args:
        path: what to open.
        flags: those of open(2).

    Raises:
        OSError: it can't be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        # Closing isn't enough if the process was forked meanwhile.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file; False if another process has it and ``wait`` is false.

    Raises:
        OSError: the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
