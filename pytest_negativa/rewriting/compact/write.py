"""Writes a file that is made of ranges of another one, zeros and a few new bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.pages import Range

_CHUNK = 1 << 20
# What copy_file_range(2) says where it can't: across file systems before Linux 5.3, on some that
# don't know it, or where a sandbox forbids it.
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A file to write; offsets are the new file's unless called old.

    Attributes:
        size: bytes.
        copies: ``(old start, old end, new start)``; behind the old file's end are zeros.
        zeros: ranges to clear.
        patches: ``(offset, bytes)``. In this order: copies, zeros, patches.
    """

    size: int
    copies: tuple[tuple[int, int, int], ...]
    zeros: tuple[Range, ...]
    patches: tuple[tuple[int, bytes], ...]


def write_blueprint(blueprint: Blueprint, source: ByteSource, target: int) -> None:
    """Write to an empty file.

    Args:
        blueprint: what to write.
        source: the old file.
        target: descriptor of the new one, open for writing.

    Raises:
        OSError: it can't be written.
        FormatError: the old file can't be read, or got shorter.
    """
    os.ftruncate(target, blueprint.size)
    for start, end, new in blueprint.copies:
        _copy(source, start, min(end, source.size), target, new)
    for start, end in blueprint.zeros:
        for position, length in _chunks(start, end):
            _write(target, bytes(length), position)
    for offset, data in blueprint.patches:
        _write(target, data, offset)


def _copy(source: ByteSource, start: int, end: int, target: int, new: int) -> None:
    while start < end:
        try:
            done = os.copy_file_range(source.fileno(), target, end - start, start, new)
        except OSError as e:
            if e.errno not in _NO_COPY:
                raise
            break
        if done == 0:
            # Some file systems say so where they can't; if it is the end, read() tells.
            break
        start += done
        new += done
    for position, length in _chunks(start, end):
        _write(target, source.read(position, length), new + position - start)


def _write(target: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(target, view, offset)
        view = view[done:]
        offset += done


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    for position in range(start, end, _CHUNK):
        yield position, min(_CHUNK, end - position)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, those that touch or overlap united, empty ones left out."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
