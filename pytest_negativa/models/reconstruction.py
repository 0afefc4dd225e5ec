"""What became of planned libraries: copies whose unused code is overwritten."""

from __future__ import annotations

from pytest_negativa.models.base import Offset, Record, Span
from pytest_negativa.models.library import LibraryIdentity

RECONSTRUCTION_VERSION = 1
"""Of the reconstruction file. History: 1 is the first."""

MANIFEST_VERSION = 1
"""Of the manifest in the folder of copies. History: 1 is the first."""


class RepackedCubin(Record, frozen=True, kw_only=True):
    """A kept cubin whose unused code is overwritten in the copy. Sizes in bytes.

    Attributes:
        start: file offset of its payload or frame.
        code_bytes: unpacked code that is overwritten.
        stored_before, stored_after: of the payload or frame in use.
        left_alone: why nothing could be overwritten, or None.
    """

    start: Offset
    code_bytes: Offset
    stored_before: Offset
    stored_after: Offset
    left_alone: str | None = None


class Compaction(Record, frozen=True, kw_only=True):
    """A copy without its unused code. Sizes in bytes.

    Attributes:
        size: of the copy's file.
        load_segments: number of its ``PT_LOAD`` headers.
        notes: what a reader of the report should know.
    """

    size: Offset
    load_segments: Offset
    notes: tuple[str, ...] = ()


class ReconstructedLibrary(Record, frozen=True, kw_only=True):
    """A library and its copy.

    Attributes:
        library: the original; its sha256 is that of the bytes the copy was made from.
        copy: real path of the copy.
        copy_sha256: hex digest of all its bytes.
        unused: what is filled in the copy; neighbours are one span.
        unused_bytes: sum of their sizes.
        elements: how many elements and frames are overwritten as a whole.
        repacked: kept cubins that lost a part of their code, by offset.
        reused: the copy of an earlier reconstruction, found unchanged.
        compaction: how the copy was made smaller; None where all bytes are in their old places.
    """

    library: LibraryIdentity
    copy: str
    copy_sha256: str
    unused: tuple[Span, ...]
    unused_bytes: Offset
    elements: Offset
    reused: bool
    repacked: tuple[RepackedCubin, ...] = ()
    compaction: Compaction | None = None


class RefusedLibrary(Record, frozen=True, kw_only=True):
    """A library of which there is no copy, though its plan has unused code."""

    path: str
    why: str


class Reconstruction(Record, frozen=True, kw_only=True):
    """All copies of a run. Libraries whose plan has nothing unused are not in it.

    Attributes:
        root: real path of the folder; the copy of ``/a/b.so`` is ``ROOT/a/b.so``.
        fill: the byte that unused code is made of.
        libraries, refused: by path.
    """

    format_version: int
    root: str
    fill: int
    libraries: tuple[ReconstructedLibrary, ...]
    refused: tuple[RefusedLibrary, ...]


class FileState(Record, frozen=True, kw_only=True):
    """What changes when somebody writes to a file, as long as the system isn't restarted."""

    size: Offset
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class CopyRecord(Record, frozen=True, kw_only=True):
    """A copy as it was when it had been checked.

    Attributes:
        recipe: digest of what it was made from and how.
        sha256: of the copy.
        copy, original: the two files at that time.
        boot: which start of the system that was; after another one, states prove nothing: what
            had not reached the disk when power failed is gone.
    """

    recipe: str
    sha256: str
    copy: FileState
    original: FileState
    boot: str
    repacked: tuple[RepackedCubin, ...] = ()
    compaction: Compaction | None = None


class Manifest(Record, frozen=True, kw_only=True):
    """What lies in a folder of copies, by path of the original; None: may be there, not checked."""

    format_version: int
    copies: dict[str, CopyRecord | None]
