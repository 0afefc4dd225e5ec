"""The same bytes in several files. Sizes are in bytes."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record, Row


class CodeDigest(Row, frozen=True):
    """A region or a bare frame, by content."""

    size: NonNegative
    sha256: bytes


class LibraryContent(Record, frozen=True, kw_only=True):
    """A library with GPU code, by content.

    Attributes:
        path: real path.
        size: of the file.
        sha256: hex digest of the file.
        code: its regions and frames; none of a slimmed library.
    """

    path: str
    size: NonNegative
    sha256: str
    code: tuple[CodeDigest, ...]


class SameFiles(Record, frozen=True, kw_only=True):
    """Files with the same content.

    Attributes:
        sha256: hex digest.
        size: of each file.
        paths: their real paths.
    """

    sha256: str
    size: NonNegative
    paths: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """What one file instead of all would save."""
        return self.size * (len(self.paths) - 1)


class SharedCode(Record, frozen=True, kw_only=True):
    """Regions and frames that the same files hold. Of files with the same content, one counts.

    Attributes:
        paths: real paths; a file that holds the code twice is there twice.
        regions: how many regions and frames.
        size: of one copy of all of them.
    """

    paths: tuple[str, ...]
    regions: int
    size: NonNegative

    @property
    def saved_bytes(self) -> int:
        """What one copy instead of all would save."""
        return self.size * (len(self.paths) - 1)


class Duplicates(Record, frozen=True, kw_only=True):
    """What is stored more than once.

    Attributes:
        files: files with the same content, the most bytes to save first.
        code: GPU code that files with different content share, the most bytes to save first.
        saved_bytes: what one copy of everything would save.
    """

    files: tuple[SameFiles, ...]
    code: tuple[SharedCode, ...]
    saved_bytes: NonNegative
