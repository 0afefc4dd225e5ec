"""Reads the logs of pages that came back, which ``runtime.c`` writes.

A log belongs to one pair of library and spare. All processes share the file. It has a head, and
from offset 4,096 on a byte for each page of the original: how often it came back, up to 255::

    Head   magic, version, 0, pair, original, original_size, name
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.spare.note import PAGE_SIZE
from pytest_negativa.storage.system import read_regular

_MAGIC = b"NEGMISS\0"
_VERSION = 1
_HEAD = struct.Struct("<8sII32s32sQ256s")

LOG_SUFFIX = ".misses"


@dataclass(frozen=True, slots=True)
class Misses:
    """The pages of one library that came back.

    Attributes:
        name: the library's file name.
        pair: digest of the original and of what was taken out.
        original: SHA-256 of the original.
        original_size: bytes.
        counts: number of misses of each page of the original, 255 for more.
    """

    name: str
    pair: bytes
    original: bytes
    original_size: int
    counts: bytes

    def ranges(self) -> list[tuple[int, int]]:
        """The pages that came back as ranges of file offsets; neighbours are one range."""
        found: list[tuple[int, int]] = []
        for page, count in enumerate(self.counts):
            start = page * PAGE_SIZE
            if count and found and found[-1][1] == start:
                found[-1] = found[-1][0], start + PAGE_SIZE
            elif count:
                found.append((start, start + PAGE_SIZE))
        return found


def read_misses(path: Path) -> Misses:
    """Read a log; processes may write to it meanwhile.

    Raises:
        FormatError: the file is no log, is damaged, or can't be read.
    """
    try:
        # Any user may write into the folder: a pipe would hang, a link mislead.
        data = read_regular(path, follow=False)
    except OSError as e:
        raise FormatError(path, None, f"cannot be read: {e.strerror}") from e
    if len(data) < PAGE_SIZE:
        raise FormatError(path, None, f"has {len(data)} bytes, less than the head of a log")
    magic, version, _, pair, original, size, name = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise FormatError(path, 0, f"is no log of misses of version {_VERSION}")
    counts = data[PAGE_SIZE:]
    if len(counts) != -(-size // PAGE_SIZE):
        raise FormatError(path, 0, f"has {len(counts)} pages, but the original {size:,} bytes")
    text = name.split(b"\0")[0].decode(errors="replace")
    return Misses(text, pair, original, size, counts)
