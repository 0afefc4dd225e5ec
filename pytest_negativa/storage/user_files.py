"""Inputs and outputs that a user names (path, URL, ``-``): what root may replace.

In image builds the user is root, so what lies at an output's path decides: only a regular file is
replaced.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.urls import Url

STDOUT = "-"
"""The path that stands for standard output."""

_DESCRIPTOR = re.compile(r"-|/dev/std(out|err)|(?:/dev|/proc/self|/proc/thread-self)/fd/([0-9]+)")


def read_input(place: Path | Url, limit: int) -> bytes:
    """The content of a file that a user names.

    Args:
        limit: bytes that it may have.

    Raises:
        StoreError: it can't be read, or is larger.
    """
    if isinstance(place, Url):
        return place.read(limit)
    with refusing(place, "read"), place.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise StoreError(f"larger than {limit:,} bytes", place)
    return data


def write_output(path: Path | Url, data: bytes) -> None:
    """Write ``data`` to the file, link, device or pipe at ``path``; ``-`` is standard output.

    A regular file is replaced, and keeps its mode and owner. What a link leads to, devices, pipes
    and descriptors such as ``/dev/stdout`` are written to.

    Raises:
        StoreError: the folder does not exist, a link may be another user's trap, or the data can't
            be written. A regular file is as it was.
    """
    if isinstance(path, Url):
        path.write(data)
    elif (descriptor := _DESCRIPTOR.fullmatch(str(path))) is not None:
        number = int(descriptor[2] or 1 + (descriptor[1] == "err"))
        _write_descriptor(path, number, data)
    else:
        _write_place(path, data)


def _write_descriptor(path: Path, number: int, data: bytes) -> None:
    if str(path) == STDOUT:
        if sys.stdout is None:
            # Another file of this process may have its number.
            raise StoreError(f"{path}: cannot be written: standard output is closed")
        sys.stdout.flush()
    with refusing(path, "written"), open(number, "wb", closefd=False) as file:
        file.write(data)


def _write_place(path: Path, data: bytes) -> None:
    """Write to a file, link, device or pipe; refuse a link that another user made."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: not written: there is no folder {path.parent}; make it first")
    if path.is_symlink() and (owner := path.lstat().st_uid) not in (0, os.geteuid()):
        raise StoreError(
            f"{path}: not written: it is a link of another user (uid {owner}); name the file "
            f"itself: {path.readlink()}"
        )
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with refusing(path, "written"), path.open("wb") as file:
            file.write(data)
    else:
        write_atomically(path, data)
