"""A library's sections and identity, as pyelftools reads them or as bare rows.

The check of a result compares by this reader, not by the rows that everything before it was planned
by. So a fault in the reading of those rows can't hide itself.
"""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

from elftools.elf.constants import SH_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, Section

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostSection
from pytest_negativa.gpucode.source import ByteSource

_ROW = struct.Struct("<IIQQQQIIQQ")  # of a section header
_SHT_NULL, _SHT_DYNAMIC, _SHT_NOTE, _SHT_NOBITS = 0, 6, 7, 8


class SecondView(NamedTuple):
    """What two files that do the same have in common.

    Attributes:
        sections: allocated sections with bytes in the file.
        build_id: hex of the GNU build id, if it has one.
        soname: ``DT_SONAME``, if it has one.
    """

    sections: tuple[HostSection, ...]
    build_id: str | None
    soname: str | None


class _ElfFile(ELFFile):
    """Leaves hash tables of symbols unread: pyelftools would unpack each number of them."""

    def _make_elf_hash_section(self, section_header: Any, name: str) -> Any:
        return Section(section_header, name, self)

    _make_gnu_hash_section = _make_elf_hash_section


def read_again(source: ByteSource) -> SecondView:
    """Read a library that the first reader accepted, or that was made of such a one.

    Raises:
        FormatError: pyelftools can't read it.
    """
    try:
        with os.fdopen(os.dup(source.fileno()), "rb") as stream:
            return _read(_ElfFile(stream))
    # On damaged files pyelftools raises KeyError, UnicodeDecodeError, struct.error and
    # AttributeError, too.
    except Exception as e:
        raise FormatError(source.path, None, f"damaged ELF file: {type(e).__name__}: {e}") from e


def _read(elf: ELFFile) -> SecondView:
    sections = []
    build_id = soname = None
    # pyelftools takes 0.1 ms to unpack a row, and a result may have thousands.
    elf.stream.seek(elf["e_shoff"])
    rows = list(_ROW.iter_unpack(elf.stream.read(elf.num_sections() * _ROW.size)))
    names = b""
    if rows:
        _, _, _, _, offset, size, *_ = rows[elf.get_shstrndx()]
        elf.stream.seek(offset)
        names = elf.stream.read(size)
    for number, (name, kind, flags, vaddr, offset, size, *_) in enumerate(rows):
        if kind in (_SHT_NULL, _SHT_NOBITS):
            continue
        section = elf.get_section(number) if kind in (_SHT_DYNAMIC, _SHT_NOTE) else None
        if isinstance(section, NoteSection):
            build_id = build_id or _find_build_id(section)
        elif isinstance(section, DynamicSection):
            for tag in section.iter_tags("DT_SONAME"):
                soname = soname or str(tag.soname)  # type: ignore[attr-defined]
        if flags & SH_FLAGS.SHF_ALLOC:
            text = names[name : names.index(b"\0", name)].decode(errors="replace")
            executable = bool(flags & SH_FLAGS.SHF_EXECINSTR)
            sections.append(HostSection(text, offset, size, vaddr, executable))
    return SecondView(tuple(sections), build_id, soname)


def _find_build_id(section: NoteSection) -> str | None:
    for note in section.iter_notes():
        if note["n_type"] == "NT_GNU_BUILD_ID" and note["n_name"] == "GNU":
            return str(note["n_desc"])
    return None
