"""Writes a file under a temporary name and renames it.

A reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from pytest_negativa.errors import StoreError

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` by way of a temporary file ``.NAME.*.tmp`` beside it.

    A file that is replaced hands down its mode and its owner.

    Raises:
        StoreError: it can't be written; the temporary file is gone and ``path`` as it was.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX
        )
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            _give_attributes(handle, path)
        temporary.replace(path)
        temporary = None
    except OSError as e:
        raise StoreError(f"{path}: cannot be written: {e.strerror}") from e
    finally:
        # Also when interrupted.
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _give_attributes(handle: int, path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        # mkstemp makes files for the owner alone; give what a plain open() would.
        os.fchmod(handle, 0o666 & ~_umask())
        return
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(handle, status.st_uid, status.st_gid)
    os.fchmod(handle, stat.S_IMODE(status.st_mode))


def _umask() -> int:
    # The only portable way to read it is to set it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
