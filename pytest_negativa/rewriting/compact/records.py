"""The options and the results of compaction."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.base import NonNegative, Record
from pytest_negativa.models.spans import MovedSpan, Span


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
        page_size: bytes; whole pages are taken out of the file. None means the largest page of a
            kernel for the library's machine.
        max_headers: program headers of the result, at most 8,000. ld.so keeps about 150 bytes for
            each on the stack of the thread that calls dlopen: 1,000 fit 128 KiB, not 64 KiB.
        min_gain: bytes; a library that would shrink by less is left as it is.
        takes_place: of the original, so the result gets its owner, attributes and times, too.
    """

    strip: bool = True
    page_size: int | None = None
    max_headers: int = 2000
    min_gain: int = 64 << 10
    takes_place: bool = False


class Smaller(Record, frozen=True, kw_only=True):
    """A library that lost bytes; sizes in bytes.

    Attributes:
        size_before, size_after: of the files.
        original_sha256, sha256: hex digests of the original and the result.
        gaps: removed ranges of file offsets of the original.
        certificate: the word of the program that compared the files.
        notes: remarks for the report.
    """

    size_before: NonNegative
    size_after: NonNegative
    original_sha256: str
    sha256: str
    gaps: tuple[Span, ...]
    certificate: str
    notes: tuple[str, ...] = ()


class Compacted(Smaller, frozen=True, kw_only=True):
    """A library that was compacted: its gaps read as zeros at run time.

    Attributes:
        load_segments: number of ``PT_LOAD`` headers.
        kept: what of the original lies where in the result, by offset.
    """

    load_segments: NonNegative
    kept: tuple[MovedSpan, ...]


class Cut(Smaller, frozen=True, kw_only=True):
    """A library that was cut: a file has its gaps.

    Attributes:
        library, spare: the files.
    """

    library: Path
    spare: Path
