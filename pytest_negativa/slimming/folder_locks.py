"""Folders that a process has for itself while it works in them.

By ``flock`` of the folders themselves: nothing is left behind, and who is killed holds none. Where
locks don't work (some network file systems) there are none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import ReconstructError


@contextlib.contextmanager
def hold(*roots: Path, shared: Path | None = None) -> Iterator[None]:
    """Wait until no other process works in these folders, and keep others out.

    Nor in folders in them or around them: whoever holds a folder shares those around it. Since all
    take them from the outermost on, nobody waits for somebody who waits.

    Args:
        roots: real paths.
        shared: a folder in which others may work, but that nobody is to have for himself.

    Raises:
        ReconstructError: a folder can't be opened.
    """
    kinds = dict.fromkeys(() if shared is None else (shared, *shared.parents), fcntl.LOCK_SH)
    kinds.update((folder, fcntl.LOCK_SH) for root in roots for folder in root.parents)
    kinds.update(dict.fromkeys(roots, fcntl.LOCK_EX))
    with contextlib.ExitStack() as stack:
        for folder in sorted(kinds):
            try:
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as e:
                # One around it that may not be read: who may, doesn't slim with our rights.
                if kinds[folder] == fcntl.LOCK_SH:
                    continue
                raise ReconstructError(f"{folder}: cannot be opened: {e.strerror}") from e
            stack.callback(os.close, handle)
            _lock(handle, kinds[folder], folder)
        yield


@contextlib.contextmanager
def hold_metadata(folder: Path, *roots: Path) -> Iterator[None]:
    """Have the metadata of a distribution for oneself, while ``roots`` are held.

    Who slims a part of a site writes to RECORD files that lie beside that part. They may be
    another of the roots (``site-packages/*``), and nobody gets twice what he has.

    Raises:
        ReconstructError: the folder can't be opened.
    """
    if {folder, *folder.parents}.intersection(roots):
        yield
        return
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise ReconstructError(f"{folder}: cannot be opened: {e.strerror}") from e
    try:
        _lock(handle, fcntl.LOCK_EX, folder)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold_new(folder: Path) -> Iterator[None]:
    """Have a folder that one has just made, or found as the remains of somebody killed.

    Raises:
        ReconstructError: another process has it.
        OSError: it can't be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ReconstructError(f"{folder}: another process makes it at this moment") from e
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def _lock(handle: int, kind: int, folder: Path) -> None:
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            # It may be no slimming, but the script that we run in ("flock DIR negativa slim ...").
            sys.stderr.write(f"negativa: waiting for a process that has locked {folder}\n")
            sys.stderr.flush()
            fcntl.flock(handle, kind)
