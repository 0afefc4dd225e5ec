"""Writes a file whose path or URL the user gave, or appends to it: a report or a lock.

In image builds the user is root, so what lies at the path decides: only a regular file is replaced.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.urls import Url

STDOUT = "-"
"""The path that stands for standard output."""

_MOST_LINKS = 40  # as in the kernel: path_resolution(7)
_DESCRIPTOR = re.compile(r"(?:/dev|/proc/self|/proc/thread-self)/fd/([0-9]+)")


def append_output(path: Path | Url, make: Callable[[int], bytes]) -> None:
    """Write to the end of a regular file; anything else is written to as by ``write_output``.

    Args:
        path: see ``write_output``.
        make: makes the data; its argument is the size of the file, in bytes.

    Raises:
        StoreError: see ``write_output``.
    """
    if isinstance(path, Url):
        raise StoreError(f"{path}: a report can't be appended to a file at a URL; name a path")
    target = path if str(path) == STDOUT else _follow(path)
    if str(path) == STDOUT or (target.exists() and not target.is_file()):
        write_output(path, make(0))
        return
    _require_folder(target.parent, path)
    with refusing(path, "written"):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, 0o666), "ab") as file:
            file.write(make(os.fstat(file.fileno()).st_size))


def write_output(path: Path | Url, data: bytes) -> None:
    """Write ``data`` to the file, link, device or pipe at ``path``; ``-`` is standard output.

    A regular file is replaced, and keeps its mode and owner. A link is followed. Devices, pipes
    and descriptors such as ``/dev/stdout`` are written to.

    Raises:
        StoreError: the folder does not exist, a link may be another user's trap, or the data can't
            be written. A regular file is as it was.
    """
    if isinstance(path, Url):
        path.write(data)
        return
    if str(path) == STDOUT:
        if sys.stdout is None:
            # Another file of this process may have its number.
            raise StoreError(f"{path}: cannot be written: standard output is closed")
        sys.stdout.flush()
        _write_all(1, data, path)
        return
    with refusing(path, "written"):
        target = _follow(path)
        if (descriptor := _DESCRIPTOR.fullmatch(str(target))) is not None:
            _write_all(int(descriptor[1]), data, path)
        elif not target.exists() or target.is_file():
            _require_folder(target.parent, path)
            write_atomically(target, data)
        elif target.is_dir():
            raise StoreError(f"{path}: is a folder; expected the path of a file")
        else:
            handle = os.open(target, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
            with os.fdopen(handle, "wb") as file:
                file.write(data)


def _follow(path: Path) -> Path:
    """The path that the links at ``path`` lead to; descriptors of this process stay links."""
    target = path.absolute()
    with refusing(path, "written"):
        for _ in range(_MOST_LINKS):
            if not target.is_symlink() or _DESCRIPTOR.fullmatch(str(target)):
                return target
            if (owner := _foreign_owner(target)) is not None:
                raise StoreError(
                    f"{path}: not written: {target} is a link of another user (uid {owner}), in a "
                    f"folder in which others can write; name the file itself: {target.readlink()}"
                )
            target = target.parent / target.readlink()
    raise StoreError(f"{path}: not written: more than {_MOST_LINKS} links in a row")


def _foreign_owner(link: Path) -> int | None:
    """The owner of a link if another user may have planted it; None if none can have.

    The kernel's ``fs.protected_symlinks`` has a like rule for sticky folders that all may write to.
    """
    owner, folder = link.lstat().st_uid, link.parent.stat()
    shared = folder.st_mode & (stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH)
    trusted = (0, os.geteuid())
    if owner == os.geteuid() or (not shared and folder.st_uid in trusted):
        return None
    return owner


def _require_folder(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise StoreError(f"{path}: not written: there is no folder {folder}; make it first")


def _write_all(descriptor: int, data: bytes, path: Path) -> None:
    with refusing(path, "written"), os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
