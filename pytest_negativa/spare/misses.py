"""Reads the logs of pages that came back, which ``runtime.c`` writes.

A log belongs to one pair of library and spare. All processes share the file. It has a head, and
from offset 4,096 on a word of 32 bits for each page of the original::

    Head   magic, version, 0, pair, original, original_size, name
    Word   bits 0-15: how many processes missed it; 16-27: where in the page first;
           28: first by an instruction fetch; 29: it came back beside a page that was missed;
           30: it could not come back to a process
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.models.spans import Span, union
from pytest_negativa.spare.note import PAGE_SIZE
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.system import read_regular

_MAGIC = b"NEGMISS\0"
_VERSION = 2
"""History: 2 has a word a page, 1 had a byte."""
_HEAD = struct.Struct("<8sII32s32sQ256s")
_WORD = 4

LOG_SUFFIX = ".misses"


class UnfinishedLogError(FormatError):
    """A log without a head: a process is making it, or was killed then. It has no misses."""


class Miss(NamedTuple):
    """A page that came back, or should have.

    Attributes:
        times: how many processes missed it; 0: it came back beside another page.
        first: file offset, in the original, of what the first of them touched.
        fetched: whether that was to run code, and not to read.
        lost: whether it could not come back to one of them: the spare was not there, or the system
            refused to map it.
    """

    times: int
    first: int
    fetched: bool
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Misses:
    """The pages of one library that came back.

    Attributes:
        name: the library's file name.
        original: SHA-256 of the original.
        original_size: bytes.
        pages: what came back, by number of the page in the original, ascending.
    """

    name: str
    original: bytes
    original_size: int
    pages: Mapping[int, Miss]

    def ranges(self) -> tuple[Span, ...]:
        """The pages that came back, as file offsets; neighbours are one span."""
        return union((page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in self.pages)


def read_misses(path: Path) -> Misses:
    """Read a log; processes may write to it meanwhile.

    Raises:
        UnfinishedLogError: it has no head yet.
        FormatError: the file is no log, is damaged, or can't be read.
    """
    try:
        # Any user may write into the folder: a pipe would hang, a link mislead.
        data = read_regular(path, follow=False)
    except OSError as e:
        raise FormatError(path, None, f"cannot be read: {e.strerror}") from e
    # runtime.c: the file gets its size first, and its magic last.
    if not any(data[: len(_MAGIC)]):
        raise UnfinishedLogError(path, None, "a process is making it, or was killed meanwhile")
    if len(data) < PAGE_SIZE:
        raise FormatError(path, None, f"has {len(data)} bytes, less than the head of a log")
    magic, version, _, _, original, size, name = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise FormatError(path, 0, f"is no log of misses of version {_VERSION}")
    count, rest = divmod(len(data) - PAGE_SIZE, _WORD)
    if rest or count != -(-size // PAGE_SIZE):
        raise FormatError(path, 0, f"has {count} pages, but the original {size:,} bytes")
    words = array.array("I", data[PAGE_SIZE:])
    if sys.byteorder == "big":
        words.byteswap()
    pages = {
        page: Miss(
            word & 0xFFFF,
            page * PAGE_SIZE + (word >> 16 & 0xFFF),
            fetched=bool(word >> 28 & 1),
            lost=bool(word >> 30 & 1),
        )
        for page, word in enumerate(words)
        if word
    }
    return Misses(name.split(b"\0")[0].decode(errors="replace"), original, size, pages)


def write_misses(misses: Misses, path: Path) -> None:
    """Write a log; its folder is made if it is not there.

    Raises:
        StoreError: it can't be written.
    """
    head = _HEAD.pack(
        _MAGIC, _VERSION, 0, misses.original, misses.original, misses.original_size,
        misses.name.encode()[:255],
    )  # fmt: skip
    words = array.array("I", bytes(_WORD * -(-misses.original_size // PAGE_SIZE)))
    for page, miss in misses.pages.items():
        words[page] = miss.times | miss.first % PAGE_SIZE << 16 | miss.fetched << 28
    if sys.byteorder == "big":
        words.byteswap()
    data = head.ljust(PAGE_SIZE, b"\0") + words.tobytes()
    write_atomically(path, data)


def read_logs(
    paths: Iterable[Path], on_unfinished: Callable[[str], object] = lambda _: None
) -> list[Misses]:
    """Read logs, and those in folders, and add them up by the content of the original.

    Args:
        paths: logs, and folders of logs.
        on_unfinished: called with a sentence for each log that is left out, because it has no head.

    Raises:
        StoreError: there is no such file or folder.
        FormatError: a file is no log, is damaged, or can't be read.
    """
    found: dict[bytes, Misses] = {}
    for path in paths:
        if not path.exists():
            raise StoreError(f"{path}: no such log, nor a folder of logs")
        for log in sorted(path.glob(f"*{LOG_SUFFIX}")) if path.is_dir() else [path]:
            try:
                misses = read_misses(log)
            except UnfinishedLogError as e:
                on_unfinished(f"{e}; it is left out")
                continue
            other = found.get(misses.original)
            found[misses.original] = misses if other is None else _sum(other, misses)
    return sorted(found.values(), key=lambda misses: (misses.name, misses.original))


def _sum(one: Misses, other: Misses) -> Misses:
    pages = dict(one.pages)
    for page, miss in other.pages.items():
        before = pages.get(page)
        if before is None or not before.times:
            pages[page] = miss
        else:
            times, lost = before.times + miss.times, before.lost or miss.lost
            pages[page] = before._replace(times=times, lost=lost)
    return Misses(one.name, one.original, one.original_size, dict(sorted(pages.items())))
