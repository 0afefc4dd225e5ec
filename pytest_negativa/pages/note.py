"""Formats of a cut library's note and its spare; why there is no stub; noexec up to 16 MiB.

A cut library is the original without pages. The *note* lies in a segment of its own, and the tag
``DT_NEGATIVA_NOTE`` of the dynamic section has its address. All numbers are little-endian::

    Note      magic, version, flags, pair, original, original_size, 0,
              where the holes are, their number, where the strings are
    Hole      start, end, offset, protection, constants      one for each hole, ascending
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
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError
from pytest_negativa.models.spans import PAGE_SIZE, MovedSpan

MAGIC = b"NEGPAGES"
NOTE_VERSION = 1
"""Of note and trailer."""

DT_NEGATIVA_NOTE = 0x6E656761
"""Tag of the note's address: of those that are free for all (System V gABI, chapter 5)."""

SPARE_FOLDER = "NEGATIVA_SPARE_DIR"
"""A variable: a folder in which libraries look for their spares, after all others."""

STUB_SECOND, STUB_START = 0x50, 0x60
"""Places of the stub's functions, see ``stub.ld``; the parameters lie first."""
STUB_SIZE = PAGE_SIZE
"""Bytes; those that the compiler's code leaves are zero."""
_PARAMETERS = struct.Struct("<7Q6I")

_RESTARTABLE = 1

_NOTE = struct.Struct("<8sII32s32sQQIIIIII")
_HOLE = struct.Struct("<QQQII")
_TRAILER = struct.Struct("<8sII32s32sQ")
_KEPT = struct.Struct("<QQQ")
_STUB = Path(__file__).with_name("_stub.bin")
# More than any library has; a damaged file may promise anything.
_MAX_ROWS = 65_536
MAX_TRAILER = 2 << 20
"""Bytes at most."""

MAX_COPIED = 16 << 20
"""Bytes that the stub copies at most, from where no code can be mapped; see stub.c."""


class Hole(NamedTuple):
    """A hole: addresses as in the file, the offset in the original, ``PROT_`` bits of mmap(2).

    ``constants``: it has any, so the tracer of staging must not make it inaccessible.
    """

    start: int
    end: int
    offset: int
    protection: int
    constants: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """The note of a cut library about itself.

    Attributes:
        original: SHA-256 of the original.
        original_size: bytes.
        holes: ascending.
        name: file name of the library.
        folders: where to look for the spare, before the library's own folder.
        remedy: what to do if the spare is missing, as a sentence.
        restartable: has sequences of rseq(2), whose code the kernel reads without a signal. So the
            tracer of staging must not make the holes inaccessible.
    """

    original: bytes
    original_size: int
    holes: tuple[Hole, ...]
    name: str
    folders: tuple[str, ...]
    remedy: str
    restartable: bool = False

    @property
    def pair(self) -> bytes:
        """Digest of the original and of what was taken out."""
        rows = b"".join(_HOLE.pack(*hole) for hole in self.holes)
        return hashlib.sha256(self.original + rows).digest()

    @property
    def spare_name(self) -> str:
        """File name of the spare."""
        return f"{self.name}.{self.pair.hex()[:16]}.spare"

    @property
    def mappings(self) -> int:
        """How many mappings the holes cost: the kernel joins neighbours, constants or not."""
        starts = {(hole.start, hole.protection) for hole in self.holes}
        return len(starts - {(hole.end, hole.protection) for hole in self.holes})

    def pack(self) -> bytes:
        """The bytes of the note."""
        holes = b"".join(_HOLE.pack(*hole) for hole in self.holes)
        folders = b"".join(folder.encode() + b"\0" for folder in self.folders)
        texts = (self.name.encode(), self.spare_name.encode(), folders, self.remedy.encode())
        places, position = [], _NOTE.size + len(holes)
        for text in texts:
            places.append(position)
            position += len(text) + 1
        flags = _RESTARTABLE if self.restartable else 0
        head = _NOTE.pack(
            MAGIC, NOTE_VERSION, flags, self.pair, self.original, self.original_size, 0,
            _NOTE.size, len(self.holes), *places,
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
        magic, version, flags, pair, original, size, _, at, count, *places = _NOTE.unpack_from(data)
        if magic != MAGIC or version != NOTE_VERSION or count > _MAX_ROWS:
            raise FormatError(
                path,
                offset,
                f"note {magic!r} of version {version}, expected {MAGIC!r} of {NOTE_VERSION}; "
                "install the library again, and slim it again",
            )
        rows = (_HOLE.unpack_from(data, at + i * _HOLE.size) for i in range(count))
        name, _, remedy = (_text(data, places[i]) for i in (0, 1, 3))
        folders = data[places[2] : data.index(b"\0\0", places[2] - 1)]
        note = Note(
            original=original,
            original_size=size,
            holes=tuple(Hole(*row) for row in rows),
            name=name,
            folders=tuple(folder.decode() for folder in folders.split(b"\0") if folder),
            remedy=remedy,
            restartable=bool(flags & _RESTARTABLE),
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
    kept: tuple[MovedSpan, ...]

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
        if magic != MAGIC or version != NOTE_VERSION or count > _MAX_ROWS:
            raise FormatError(path, offset, "is no spare, or one of another version")
        rows = (_KEPT.unpack_from(data, _TRAILER.size + i * _KEPT.size) for i in range(count))
        return Trailer(pair, original, size, tuple(MovedSpan(*row) for row in rows))
    except struct.error as e:
        raise FormatError(path, offset, f"its trailer is damaged: {e}") from e


def last_trailer(path: Path) -> Trailer:
    """The trailer of a spare whose library is not at hand.

    It begins with the last page that begins like one.

    Raises:
        FormatError: the file can't be read, or has none.
    """
    try:
        with path.open("rb") as spare:
            file = spare.fileno()
            size = os.fstat(file).st_size
            end = (size - 1) // PAGE_SIZE
            for page in range(end, max(end - MAX_TRAILER // PAGE_SIZE, 0) - 1, -1):
                start = page * PAGE_SIZE
                if os.pread(file, len(MAGIC), start) == MAGIC:
                    return unpack_trailer(os.pread(file, size - start, start), str(path), start)
    except OSError as e:
        raise FormatError(str(path), None, f"cannot be read: {e.strerror}") from e
    raise FormatError(str(path), None, "is no spare: it has no trailer")


PROBLEMS = (
    "lies in none of its folders",
    "can't be opened",
    "is that of another library or of another cut",
    "is not trusted: others than root and the library's owner may write to it or to its folder",
    "lies where no code may run (a file system mounted noexec) and is too large to be copied",
    "can't be mapped: no memory is left, or no more mappings (vm.max_map_count)",
)
"""The stub's messages about a spare without which its library can't be loaded, in its order."""


def stub_for(
    *,
    own: int,
    note: int,
    symbols: int,
    symbols_start: int,
    symbols_size: int,
    headers: int,
    header_count: int,
    messages: Sequence[int],
) -> bytes:
    """The code that maps the spare while the library is relocated.

    Args:
        own, note: addresses, as in the file, of the stub and the note.
        symbols: address of the dynamic symbols.
        symbols_start, symbols_size: the pages of their segment; address and bytes.
        headers, header_count: address and number of the program headers.
        messages: offsets in the dynamic strings, see ``PROBLEMS``.

    Raises:
        FileNotFoundError: it was not built.
    """
    numbers = (own, note, symbols, symbols_start, symbols_size, headers, header_count)
    code = _STUB.read_bytes()[_PARAMETERS.size :]
    return (_PARAMETERS.pack(*numbers, *messages) + code).ljust(STUB_SIZE, b"\0")


def why_no_stub() -> str | None:
    """The reason why no library can be cut on this machine; None: it can."""
    if platform.machine() != "x86_64":
        return f"spares need x86-64, and this machine is {platform.machine()}"
    if not _STUB.is_file():
        return "the code that maps spares was not built: it needs a C compiler"
    return None
