"""Exchanges two names, so that no file is lost if another process takes the place meanwhile.

Source: rename(2), ``RENAME_EXCHANGE``. Not all file systems have it. On overlayfs
it copies the old file from its image layer, which costs the time and space of the whole file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 1 << 1
# linux/magic.h. f_type is the first field of struct statfs on 64-bit machines.
_OVERLAYFS_MAGIC = 0x794C7630
_STATFS_SIZE = 512
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def exchange(first: Path, second: Path) -> bool:
    """Let each of two names lead to the other's file, at once.

    Returns:
        False if the file system can't do it, or only at a high price; then nothing was done.

    Raises:
        OSError: one of the names is gone, or the folder can't be written.
    """
    libc = _libc()
    if not hasattr(libc, "renameat2") or is_overlay(first.parent):
        return False
    # As os.rename does.
    sys.audit("os.rename", os.fspath(first), os.fspath(second), -1, -1)
    names = os.fsencode(first), os.fsencode(second)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), os.fspath(second))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_overlay(folder: Path) -> bool:
    """Whether renaming a file in the folder may copy it from an image layer first."""
    libc = _libc()
    buffer = ctypes.create_string_buffer(_STATFS_SIZE)
    if libc.statfs(os.fsencode(folder), buffer):
        return False
    return int.from_bytes(buffer.raw[:8], sys.byteorder) == _OVERLAYFS_MAGIC
