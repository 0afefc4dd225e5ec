"""Copies of planned libraries, whose unused code is overwritten with ``FILL`` (0x01)."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.spans import MovedSpan, Span, size

FILL = 1
"""The byte that unused code becomes."""


class RepackedCubin(Record, frozen=True, kw_only=True):
    """A kept cubin whose unused code is overwritten in the copy. Sizes in bytes.

    Attributes:
        start: file offset of its payload or frame.
        filled: unpacked code that is overwritten, as offsets in the unpacked cubin.
        stored_before, stored_after: of the payload or frame in use.
        left_alone: why nothing could be overwritten, or None.
    """

    start: NonNegative
    filled: tuple[Span, ...]
    stored_before: NonNegative
    stored_after: NonNegative
    left_alone: str | None = None

    @property
    def code_bytes(self) -> int:
        """Bytes of code that were filled in the unpacked cubin."""
        return size(self.filled)


class Compaction(Record, frozen=True, kw_only=True):
    """A copy without its unused code. Sizes in bytes.

    Attributes:
        size: of the copy's file.
        notes: what a reader of the report should know.
        kept: what of the original lies where in the copy, by offset.
    """

    size: NonNegative
    notes: tuple[str, ...] = ()
    kept: tuple[MovedSpan, ...]


class ReconstructedLibrary(Record, frozen=True, kw_only=True):
    """A library and its copy.

    Attributes:
        library: the original; its sha256 is that of the bytes the copy was made from.
        recipe: digest of what the copy was made from and how.
        copy: real path of the copy.
        copy_sha256: hex digest of all its bytes.
        unused: the elements and frames that are filled in the copy or gone from it, as offsets
            in the original; neighbours are one span.
        unused_bytes: sum of their sizes.
        elements: how many elements and frames that is.
        repacked: kept cubins that lost a part of their code, by offset.
        reused: the copy of an earlier reconstruction, found unchanged.
        compaction: how the copy was made smaller; None where all bytes are in their old places.
        not_compacted: why the copy was overwritten, though compacted copies were asked for.
        copy_state, original_state: of the two files when the copy had been made, or was found
            unchanged.
    """

    library: LibraryIdentity
    recipe: str
    copy: str
    copy_sha256: str
    unused: tuple[Span, ...]
    unused_bytes: NonNegative
    elements: NonNegative
    reused: bool
    repacked: tuple[RepackedCubin, ...] = ()
    compaction: Compaction | None = None
    not_compacted: str | None = None
    copy_state: FileState
    original_state: FileState

    @property
    def changes_code(self) -> bool:
        """Whether any GPU code is gone: tests on a copy without show nothing."""
        return bool(self.unused) or any(cubin.filled for cubin in self.repacked)


class Reconstruction(Versioned, Record, frozen=True, kw_only=True):
    """All copies of a run. Libraries whose plan has nothing unused are not in it.

    Attributes:
        root: real path of the folder; the copy of ``/a/b.so`` is ``ROOT/a/b.so``.
        fill: the byte that unused code is made of.
        libraries: by path.
        refused: by path, why a library has no copy though its plan has unused code.
    """

    root: str
    fill: int
    libraries: tuple[ReconstructedLibrary, ...]
    refused: dict[str, str]

    @property
    def hard_links(self) -> dict[str, tuple[str, ...]]:
        """By path of each original: the paths of this file whose copies are alike."""
        names: dict[tuple[object, ...], list[str]] = {}
        for copy in self.libraries:
            state = copy.original_state
            key = state.device, state.inode, copy.copy_sha256
            names.setdefault(key, []).append(copy.library.path)
        return {path: tuple(paths) for paths in names.values() for path in paths}


class Manifest(Versioned, Record, frozen=True, kw_only=True):
    """Contents of a folder of copies.

    Attributes:
        copies: as they were when they had been checked, by path of the original; None: one may be
            there, not checked.
    """

    copies: dict[str, ReconstructedLibrary | None]


NO_COPIES = Reconstruction(root="", fill=FILL, libraries=(), refused={})
"""Of a round on the originals."""
