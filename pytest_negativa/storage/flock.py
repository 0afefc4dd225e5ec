"""Locks of files and folders between processes, by flock(2).

A lock ends with the process that holds it, however that ends, and leaves nothing behind. The
programs that the process starts don't get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError, StoreError, refusing


@contextlib.contextmanager
def open_to_lock(path: Path, flags: int, kind: type[NegativaError] = StoreError) -> Iterator[int]:
    """Open a file or a folder for ``lock``, and unlock it at the end.

    Args:
        path: what to open.
        flags: those of open(2).
        kind: of the error.

    Raises:
        NegativaError: it can't be opened.
    """
    with refusing(path, "opened", kind):
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


@contextlib.contextmanager
def held(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a folder itself, so that no lock file is left behind; say for whom this waits.

    On a file system without locks, such as some network file systems, there is no protection.

    Args:
        folder: the folder.
        shared: other processes may hold it so, too.

    Raises:
        ReconstructError: it can't be opened.
    """
    with open_to_lock(folder, os.O_RDONLY | os.O_DIRECTORY, ReconstructError) as descriptor:
        with contextlib.suppress(OSError):
            if not lock(descriptor, shared=shared, wait=False):
                # It may be the script that runs this command ("flock DIR negativa slim ...").
                sys.stderr.write(
                    f"negativa: waiting for a process that has locked {folder} (lslocks lists it)\n"
                )
                sys.stderr.flush()
                lock(descriptor, shared=shared)
        yield
