"""The formats of a cut library and its spare, which ``runtime.c`` reads at run time.

A cut library is the original without pages. The *note* lies in a segment of its own, and the tag
``DT_NEGATIVA_NOTE`` of the dynamic section has its address. All numbers are little-endian::

    Note      magic, version, flags, pair, original, original_size, slot,
              where the holes are, their number, where the strings are
    Hole      start, end, offset, protection, 0              one for each gap, ascending
    strings   name, name of the spare, folders of the spare, remedy

The spare is a sparse file. It has the bytes that left the library, at their offsets in the
original. A *trailer* lies behind them, from the next multiple of 4,096 on::

    Trailer   magic, version, number of kept ranges, pair, original, original_size
    Kept      start, end, place                              one for each range, ascending

The kept ranges tell which bytes of the original lie where in the cut library. So library and spare
together give the original. ``pair`` is a digest of the original and of what was taken out: only a
spare with the same pair fits.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError

MAGIC = b"NEGSPARE"
NOTE_VERSION = 2
"""Of note and trailer; those of before can be read. History:

- 1: the first.
- 2: holes in writable segments, which the first runtime would bring back read-only.
"""

PAGE_SIZE = 4096
DT_NEGATIVA_NOTE = 0x6E656761
"""Tag of the note's address: of those that are free for all (System V gABI, chapter 5)."""

RUNTIME_NAME = "libnegativa_spare.so"
SPARE_FOLDER = "NEGATIVA_SPARE_DIR"
"""A variable: a folder in which the runtime looks for spares."""

MISSING_IS_ERROR = 1

_NOTE = struct.Struct("<8sII32s32sQQIIIIII")
_HOLE = struct.Struct("<QQQII")
_TRAILER = struct.Struct("<8sII32s32sQ")
_KEPT = struct.Struct("<QQQ")
# More than any library has; a damaged file may promise anything.
_MAX_ROWS = 65_536
MAX_TRAILER = 2 << 20
"""Bytes at most."""


class Hole(NamedTuple):
    """A gap: addresses as in the file, the offset in the original, ``PROT_`` bits of mmap(2)."""

    start: int
    end: int
    offset: int
    protection: int


class Kept(NamedTuple):
    """Bytes ``[start, end)`` of the original, which lie at ``place`` in the cut library."""

    start: int
    end: int
    place: int


@dataclass(frozen=True, slots=True)
class Note:
    """What a cut library says about itself.

    Attributes:
        original: SHA-256 of the original.
        original_size: bytes.
        holes: ascending.
        slot: address of the word through which the library's start calls.
        name: file name of the library.
        folders: where to look for the spare, before the library's own folder.
        remedy: what to do if the spare is missing, as a sentence.
        missing_is_error: refuse to start without the spare.
    """

    original: bytes
    original_size: int
    holes: tuple[Hole, ...]
    slot: int
    name: str
    folders: tuple[str, ...]
    remedy: str
    missing_is_error: bool

    @property
    def pair(self) -> bytes:
        """Digest of the original and of what was taken out."""
        rows = b"".join(_HOLE.pack(*hole, 0) for hole in self.holes)
        return hashlib.sha256(self.original + rows).digest()

    @property
    def spare_name(self) -> str:
        """File name of the spare."""
        return f"{self.name}.{self.pair.hex()[:16]}.spare"

    def pack(self) -> bytes:
        """The bytes of the note."""
        holes = b"".join(_HOLE.pack(*hole, 0) for hole in self.holes)
        folders = b"".join(folder.encode() + b"\0" for folder in self.folders)
        texts = (self.name.encode(), self.spare_name.encode(), folders, self.remedy.encode())
        places, position = [], _NOTE.size + len(holes)
        for text in texts:
            places.append(position)
            position += len(text) + 1
        head = _NOTE.pack(
            MAGIC, NOTE_VERSION, MISSING_IS_ERROR if self.missing_is_error else 0, self.pair,
            self.original, self.original_size, self.slot, _NOTE.size, len(self.holes), *places,
        )  # fmt: skip
        return head + holes + b"".join(text + b"\0" for text in texts)


def unpack_note(data: bytes, path: str, offset: int) -> Note:
    """Read a note.

    Args:
        data: from the note's first byte on, at least to its end.
        path, offset: the library and the note's place, for messages.

    Raises:
        FormatError: the note is damaged, or of another version.
    """
    try:
        magic, version, flags, pair, original, size, slot, at, count, *places = _NOTE.unpack_from(
            data
        )
        if magic != MAGIC or not 1 <= version <= NOTE_VERSION or count > _MAX_ROWS:
            raise FormatError(
                path, offset, f"note {magic!r} of version {version}, expected {NOTE_VERSION}"
            )
        rows = (_HOLE.unpack_from(data, at + i * _HOLE.size) for i in range(count))
        name, _, remedy = (_text(data, places[i]) for i in (0, 1, 3))
        folders = data[places[2] : data.index(b"\0\0", places[2] - 1)]
        note = Note(
            original=original,
            original_size=size,
            holes=tuple(Hole(*row[:4]) for row in rows),
            slot=slot,
            name=name,
            folders=tuple(folder.decode() for folder in folders.split(b"\0") if folder),
            remedy=remedy,
            missing_is_error=bool(flags & MISSING_IS_ERROR),
        )
    except (struct.error, ValueError) as e:
        raise FormatError(path, offset, f"its note is damaged: {e}") from e
    if note.pair != pair:
        raise FormatError(path, offset, "its note is damaged: holes and digest do not agree")
    return note


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


@dataclass(frozen=True, slots=True)
class Trailer:
    """The end of a spare; see ``Note``.

    Attributes:
        kept: ascending.
    """

    pair: bytes
    original: bytes
    original_size: int
    kept: tuple[Kept, ...]

    def pack(self) -> bytes:
        """The bytes of the trailer."""
        head = _TRAILER.pack(
            MAGIC, NOTE_VERSION, len(self.kept), self.pair, self.original, self.original_size
        )
        return head + b"".join(_KEPT.pack(*row) for row in self.kept)


def trailer_offset(original_size: int) -> int:
    """The trailer's place in the spare of an original of so many bytes."""
    return -(-original_size // PAGE_SIZE) * PAGE_SIZE


def unpack_trailer(data: bytes, path: str, offset: int) -> Trailer:
    """Read a trailer.

    Args:
        data: from the trailer's first byte to the end of the file.
        path, offset: the spare and the trailer's place, for messages.

    Raises:
        FormatError: the trailer is damaged, or of another version.
    """
    try:
        magic, version, count, pair, original, size = _TRAILER.unpack_from(data)
        if magic != MAGIC or not 1 <= version <= NOTE_VERSION or count > _MAX_ROWS:
            raise FormatError(path, offset, "is no spare, or one of another version")
        rows = (_KEPT.unpack_from(data, _TRAILER.size + i * _KEPT.size) for i in range(count))
        return Trailer(pair, original, size, tuple(Kept(*row) for row in rows))
    except struct.error as e:
        raise FormatError(path, offset, f"its trailer is damaged: {e}") from e


def runtime_library() -> Path | None:
    """The library that brings pages back; None: it was not built."""
    path = Path(__file__).with_name("_runtime.so")
    return path if path.is_file() else None


def why_no_runtime() -> str:
    """Why there is no runtime on this machine."""
    if platform.machine() != "x86_64":
        return f"spares need x86-64, and this machine is {platform.machine()}"
    return "the spare's runtime was not built: it needs a C compiler"
