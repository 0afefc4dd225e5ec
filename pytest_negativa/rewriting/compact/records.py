"""Options and results of compaction; under ``MIN_GAIN`` (65.5 kB) a library stays whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.base import NonNegative, Record
from pytest_negativa.models.spans import MovedSpan, Span
from pytest_negativa.pages.note import Note
from pytest_negativa.rewriting.layout import FileLayout

MIN_GAIN = 64 << 10
"""Bytes (65.5 kB); a library that would lose less stays whole: that is not worth another file."""


class CannotCompactError(ReconstructError):
    """Compaction leaves a library as it is; ``reason`` tells why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"not compacted: {reason}", os.fspath(path))
        self.reason = reason
        self.args = path, reason


class CheckError(CannotCompactError):
    """The result is wrong: the writer has a bug, or the disk is faulty."""


@dataclass(frozen=True, slots=True)
class CompactOptions:
    """The choices for compaction.

    Attributes:
        strip: drop symbol table and debug information.
        max_headers: program headers of the result, at most 8,000. ld.so keeps about 150 bytes for
            each on the stack of the thread that calls dlopen: 1,000 fit 128 KiB, not 64 KiB.
        min_gain: bytes; a library that would shrink by less is left as it is.
        takes_place: of the original, so the result gets its owner, attributes and times, too.
    """

    strip: bool = True
    max_headers: int = 2000
    min_gain: int = MIN_GAIN
    takes_place: bool = False


class Smaller(Record, frozen=True, kw_only=True):
    """A library that lost bytes; sizes in bytes.

    Attributes:
        library: the new file.
        size_before, size_after: of the files.
        original_sha256, sha256: hex digests of the original and the result.
        holes: removed ranges of file offsets of the original. Without a spare they read as zeros.
        kept: what of the original lies where in the result, by offset.
        certificate: the word of the program that compared the files.
        notes: remarks for the report.
    """

    library: Path
    size_before: NonNegative
    size_after: NonNegative
    original_sha256: str
    sha256: str
    holes: tuple[Span, ...]
    kept: tuple[MovedSpan, ...]
    certificate: str
    notes: tuple[str, ...] = ()


class Cut(Smaller, frozen=True, kw_only=True):
    """A library that was cut.

    Attributes:
        spare: the file that has its holes.
        mapped: how many mappings they cost, see ``Note.mappings``.
    """

    spare: Path
    mapped: NonNegative


@dataclass(frozen=True, slots=True)
class Spare:
    """The file that has what a library lost, before it is written; ``note`` is the library's."""

    layout: FileLayout
    note: Note


@dataclass(frozen=True, slots=True)
class Design:
    """A smaller library before it is written.

    Attributes:
        layout: the new file.
        holes: ranges of file offsets of the original that leave it.
        notes: remarks for the report.
        spare: where the holes go; None: they are lost.
    """

    layout: FileLayout
    holes: tuple[Span, ...]
    notes: tuple[str, ...] = ()
    spare: Spare | None = None

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return self.layout.edits.size
