"""Whether a library was slimmed: then its sections are in pieces, and no GPU code is found there.

``negativa slim`` leaves a section ``.negativa`` in the files that it writes.
"""

from __future__ import annotations

import os
import struct

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import ELF_HEADER, ELF_MAGIC
from pytest_negativa.gpucode.source import ByteSource

SLIMMED = "slimmed by negativa slim: its GPU code is not listed; look at the original"
_MARKER = b"\0.negativa\0"
# gABI: sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign,
# sh_entsize.
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_MAX_NAMES = 1 << 20


def is_slimmed(path: str | os.PathLike[str]) -> bool:
    """Whether the names of the sections have the marker; False for what can't be read."""
    try:
        with ByteSource(path) as source:
            if source.size < ELF_HEADER.size:
                return False
            header = ELF_HEADER.unpack(source.read(0, ELF_HEADER.size))
            if not header[0].startswith(ELF_MAGIC) or header[11] != _SECTION_HEADER.size:
                return False
            at = header[6] + header[13] * _SECTION_HEADER.size
            names = _SECTION_HEADER.unpack(source.read(at, _SECTION_HEADER.size))
            return _MARKER in source.read(names[4], min(names[5], _MAX_NAMES))
    except FormatError:
        return False
