"""The marker of slimmed libraries: ``negativa slim`` writes a section ``.negativa`` into them."""

from __future__ import annotations

import os

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf_tables import EHDR, ELF_MAGIC, SHDR, ElfHeader, SectionHeader
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import UNDECODABLE

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
SOUND_VERSIONS = (1, MARKER_VERSION)
"""Of slimmed files that work; only those of the last version are read."""

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


def check_version(source: ByteSource) -> None:
    """Check that what is left in a slimmed library can be read.

    Raises:
        FormatError: the marker is damaged, or of another release.
    """
    version = _facts(source)["compacted"]
    if version != MARKER_VERSION:
        raise FormatError(
            source.path,
            None,
            f"slimmed by an earlier release (section .negativa is of version {version}, expected "
            f"{MARKER_VERSION}) and can't be read; undo or reinstall, and slim again",
        )


def size_before(source: ByteSource) -> int | None:
    """Size of the original in bytes, as the marker states it; None if it states none.

    Raises:
        FormatError: the marker is damaged, or of a later release.
    """
    before = _facts(source).get("size_before")
    return before if type(before) is int and before >= 0 else None


def spare_name(source: ByteSource) -> str | None:
    """File name of the spare that has the rest of a slimmed library; None if it has no spare.

    Raises:
        FormatError: see ``size_before``.
    """
    name = _facts(source).get("spare")
    return name if isinstance(name, str) else None


def _facts(source: ByteSource) -> dict[str, object]:
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


def _parse_marker(source: ByteSource, offset: int, size: int) -> dict[str, object]:
    if size > _MAX_MARKER_SIZE:
        raise FormatError(
            source.path, offset, f"section .negativa has {size:,} bytes; damaged: install it again"
        )
    try:
        facts = msgspec.json.decode(source.read(offset, size))
    except UNDECODABLE as e:
        raise FormatError(
            source.path, offset, f"section .negativa is no JSON ({e}); damaged: install it again"
        ) from e
    version = facts.get("compacted") if isinstance(facts, dict) else None
    if not isinstance(facts, dict) or version not in SOUND_VERSIONS:
        raise FormatError(
            source.path,
            offset,
            f"section .negativa is of version {version!r}, expected {MARKER_VERSION}: damaged, or "
            "slimmed by a later release of pytest-negativa",
        )
    return facts
