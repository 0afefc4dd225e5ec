"""The marker of slimmed libraries: ``negativa slim`` writes a section ``.negativa`` into them."""

from __future__ import annotations

import os

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf, read_host_elf
from pytest_negativa.gpucode.source import ByteSource, read_fact
from pytest_negativa.models.base import UNDECODABLE, NonNegative

SLIMMED = (
    "slimmed by negativa slim, so nothing is planned for it: its offsets differ from those of the "
    "original; use the original (negativa inspect shows what is left)"
)
"""Why a plan can't be made for such a library."""

WHOLE = ".whole"
"""Prefix of the name of a section that lost pages; its pieces have the name without it."""

MARKER_VERSION = 2
"""Of slimmed files. 1 has no sections ``.whole``, so the places of the old ones are not known."""

_MAX_MARKER_SIZE = 1 << 16


def is_slimmed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a slimmed library; False for a file that can't be read."""
    return bool(read_fact(path, has_marker))


def has_marker(source: ByteSource) -> bool:
    """Whether the file has the section of the marker; False if its tables can't be read."""
    try:
        return read_host_elf(source).marker is not None
    except FormatError:
        return False


class Marker(msgspec.Struct, frozen=True):
    """The JSON about the original.

    Attributes:
        compacted: the version of the marker.
        size_before: size of the original, bytes.
        spare: file name of the spare that has the rest; None if there is none.
    """

    compacted: int
    size_before: NonNegative
    spare: str | None = None


def read_marker(source: ByteSource, host: HostElf) -> Marker:
    """Read the marker of a slimmed library.

    Raises:
        FormatError: the marker is damaged, or of another release.
    """
    if host.marker is None:
        raise FormatError(
            source.path,
            None,
            "has no section .negativa, as slimmed libraries have; damaged: install it again",
        )
    offset, size = host.marker
    if size > _MAX_MARKER_SIZE:
        raise FormatError(
            source.path, offset, f"section .negativa has {size:,} bytes; damaged: install it again"
        )
    try:
        marker = msgspec.json.decode(source.read(offset, size), type=Marker)
    except UNDECODABLE as e:
        raise FormatError(
            source.path, offset, f"section .negativa: {e}; damaged: install it again"
        ) from e
    if marker.compacted != MARKER_VERSION:
        raise FormatError(
            source.path,
            offset,
            f"section .negativa is of version {marker.compacted}, expected {MARKER_VERSION}; "
            "slimmed by another release of pytest-negativa: undo or reinstall, and slim again",
        )
    return marker
