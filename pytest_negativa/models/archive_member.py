"""A file in an archive that can be read on its own, without the rest of the archive."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.models.base import NonNegative, Record


class Member(Record, frozen=True, kw_only=True):
    """A file in an archive, and where its bytes lie.

    Attributes:
        archive: real path of the archive.
        name: the file's path in the archive, with ``/``.
        size: bytes, unpacked.
        start: file offset of its data in the archive.
        packed_size: bytes of its data in the archive.
        crc: CRC-32 of the unpacked bytes if they are deflated (RFC 1951); None if they lie in the
            archive as they are.
        shown_in: path of the image that ``archive`` is a layer of.
    """

    archive: str
    name: str
    size: NonNegative
    start: NonNegative
    packed_size: NonNegative
    crc: int | None = None
    shown_in: str | None = None

    @property
    def path(self) -> Path:
        """Its path as if the archive were a folder."""
        return Path(self.shown_in or self.archive, self.name)
