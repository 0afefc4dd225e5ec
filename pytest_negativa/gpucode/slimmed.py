"""The marker of slimmed libraries: ``negativa slim`` writes a section ``.negativa`` into them."""

from __future__ import annotations

import os

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf_tables import EHDR, ELF_MAGIC, SHDR, ElfHeader, SectionHeader
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import UNDECODABLE, NonNegative

SLIMMED = (
    "slimmed by negativa slim, so nothing is planned for it: its offsets differ from those of the "
    "original; use the original (negativa inspect shows what is left)"
)
"""Why a plan can't be made for such a library."""

WHOLE = ".whole"
"""Prefix of the name of a section that lost pages; its pieces have the name without it."""

MARKER = b".negativa"
"""Name of a section, never loaded, with JSON about the original."""

MARKER_VERSION = 2
"""Of slimmed files. 1 has no sections ``.whole``, so the places of the old ones are not known."""

_MAX_MARKER_SIZE = 1 << 16
_MAX_NAMES = 1 << 20


def is_slimmed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a slimmed library; False for a file that can't be read."""
    try:
        with ByteSource(path) as source:
            return has_marker(source)
    except FormatError:
        return False


def has_marker(source: ByteSource) -> bool:
    """Whether the names of the sections have the marker; False if they can't be read."""
    try:
        return source.size >= EHDR.size and b"\0" + MARKER + b"\0" in _names(source)
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


def read_marker(source: ByteSource) -> Marker:
    """Read the marker of a slimmed library.

    Raises:
        FormatError: the marker is damaged, or of another release.
    """
    header = _header(source)
    names = _names(source)
    for index in range(header.e_shnum):
        section = _section(source, header, index)
        if names.startswith(MARKER + b"\0", section.sh_name):
            return _parse_marker(source, section.sh_offset, section.sh_size)
    raise FormatError(
        source.path,
        None,
        "has no section .negativa, as slimmed libraries have; damaged: install it again",
    )


def _names(source: ByteSource) -> bytes:
    """The names of all sections; empty if the file is no ELF file with section headers."""
    header = _header(source)
    if not header.e_ident.startswith(ELF_MAGIC) or header.e_shentsize != SHDR.size:
        return b""
    names = _section(source, header, header.e_shstrndx)
    return source.read(names.sh_offset, min(names.sh_size, _MAX_NAMES))


def _header(source: ByteSource) -> ElfHeader:
    return EHDR.unpack_from(source.read(0, EHDR.size))


def _section(source: ByteSource, header: ElfHeader, index: int) -> SectionHeader:
    return SHDR.unpack_from(source.read(header.e_shoff + index * SHDR.size, SHDR.size))


def _parse_marker(source: ByteSource, offset: int, size: int) -> Marker:
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
