"""The GNU build id in the notes of an ELF file; readers of files and of memory share it."""

from __future__ import annotations

import struct

_NOTE = struct.Struct("<III")
_NT_GNU_BUILD_ID, _GNU = 3, b"GNU\0"


def find_build_id(notes: bytes) -> str | None:
    """Find the build id, as hex digits; None if there is none, or an empty one.

    Args:
        notes: a section or segment of notes: sizes of name and content, type, name, content; name
            and content end at multiples of 4 bytes (System V gABI, chapter 5, Note Section).
    """
    position = 0
    while position + _NOTE.size <= len(notes):
        name_size, size, kind = _NOTE.unpack_from(notes, position)
        name = position + _NOTE.size
        start = name + (name_size + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[name : name + name_size] == _GNU:
            return notes[start : start + size].hex() or None
        position = start + (size + 3 & ~3)
    return None
