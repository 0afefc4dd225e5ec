"""Puts an original together again, from the cut library and its spare."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, refusing
from pytest_negativa.gpucode import elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.pages.note import (
    DT_NEGATIVA_NOTE,
    Note,
    Trailer,
    trailer_offset,
    unpack_note,
    unpack_trailer,
)
from pytest_negativa.rewriting.compact.original_tables import read_at, read_dynamic
from pytest_negativa.rewriting.compact.records import CannotCompactError
from pytest_negativa.storage.atomic import NewFile, copy_metadata, set_mtime

_STEP = 1 << 20
# Bytes; 65,536 holes and their strings.
_MAX_NOTE = 4 << 20


def read_note(library: ByteSource) -> Note | None:
    """The note of a cut library; None: the file is no cut library.

    Raises:
        FormatError: the note is damaged.
    """
    try:
        tables = elf.read_tables(library)
        address = read_dynamic(library, tables).get(DT_NEGATIVA_NOTE)
        if address is None:
            return None
        data = read_at(library, tables, address, _MAX_NOTE, partly=True)
    except (FormatError, CannotCompactError):
        return None
    return unpack_note(data, library.path, address)


def read_trailer(spare: ByteSource, note: Note) -> Trailer:
    """The trailer of a library's spare.

    Raises:
        FormatError: the file is no spare, or that of another library.
    """
    start = trailer_offset(note.original_size)
    if start > spare.size:
        raise FormatError(spare.path, None, "is too short for a spare of this library")
    trailer = unpack_trailer(spare.read(start, spare.size - start), spare.path, start)
    if (trailer.pair, trailer.original, trailer.original_size) != (
        note.pair, note.original, note.original_size,
    ):  # fmt: skip
        raise FormatError(spare.path, start, "is the spare of another library, or of another cut")
    return trailer


class OriginalSource(ByteSource):
    """The original of a cut library, read from the library and its spare.

    Its digest is not compared: that takes reading all of it.

    Args:
        library, spare: the pair, open for as long as this is read.
        note: of the library, if it was read before.

    Attributes:
        spare: see above.
        note: that of the library.

    Raises:
        FormatError: a file can't be read, or is damaged.
        ReconstructError: the library has no spare.
    """

    def __init__(self, library: ByteSource, spare: ByteSource, note: Note | None = None) -> None:
        if (note := note or read_note(library)) is None:
            raise ReconstructError(f"{library.path}: is no library with a spare")
        self.note = note
        self._library, self.spare = library, spare
        self._kept = read_trailer(spare, note).kept
        self.path, self.size = library.path, note.original_size
        self.mtime_ns, self.state = library.mtime_ns, library.state

    def read(self, offset: int, length: int) -> bytes:
        """See ``ByteSource.read``."""
        self._check_range(offset, length)
        parts, end = [], offset + length
        first = bisect.bisect_right(self._kept, offset, key=attrgetter("end"))
        for kept in itertools.islice(self._kept, first, None):
            if offset < (stop := min(kept.start, end)):
                parts.append(self.spare.read(offset, stop - offset))
                offset = stop
            if offset >= (stop := min(kept.end, end)):
                break
            parts.append(self._library.read(kept.target + offset - kept.start, stop - offset))
            offset = stop
        return b"".join([*parts, self.spare.read(offset, end - offset)])

    def is_unchanged(self) -> bool:
        """See ``ByteSource.is_unchanged``; of both."""
        return self._library.is_unchanged() and self.spare.is_unchanged()

    def close(self) -> None:
        """Nothing of its own is open."""


def check_pair(library: Path, spare: Path, note: Note | None = None) -> None:
    """Check that a library and its spare give the original back; ``note`` if it was read before.

    Raises:
        FormatError: a file can't be read.
        ReconstructError: they don't.
    """
    with ByteSource(library) as cut, ByteSource(spare) as kept:
        for _ in _rebuilt(OriginalSource(cut, kept, note)):
            pass


def _rebuilt(original: OriginalSource) -> Iterator[bytes]:
    """The bytes of the original; the digest is compared behind the last.

    Raises:
        FormatError: a file can't be read.
        ReconstructError: the files are damaged.
    """
    digest = hashlib.sha256()
    for position in range(0, original.size, _STEP):
        data = original.read(position, min(_STEP, original.size - position))
        digest.update(data)
        yield data
    if digest.digest() != original.note.original:
        raise ReconstructError(
            f"{original.path}: with its spare {original.spare.path} it does not give the original "
            "back: one of the two is damaged; install the original again"
        )


def rebuild_original(library: Path, spare: Path, target: Path, mtime_ns: int | None = None) -> str:
    """Write the original of a cut library; it gets its name when its digest is right.

    Args:
        library, spare: the pair.
        target: the original, with the library's owner, mode, attributes and times; it may be
            ``library``.
        mtime_ns: the modification time that it gets instead, in ns since the epoch.

    Returns:
        The digest, in hex.

    Raises:
        FormatError: a file can't be read.
        ReconstructError: the files are no pair, are damaged, or the target can't be written.
    """
    with (
        refusing(target, "written", ReconstructError),
        ByteSource(library) as cut,
        ByteSource(spare) as kept,
        NewFile(target) as new,
    ):
        original = OriginalSource(cut, kept)
        with os.fdopen(os.dup(new.fd), "wb") as file:
            file.writelines(_rebuilt(original))
        copy_metadata(cut.fileno(), new.fd)
        if mtime_ns is not None:
            set_mtime(new.fd, mtime_ns)
        new.publish()
        return original.note.original.hex()
