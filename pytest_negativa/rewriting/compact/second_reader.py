"""A library's sections and identity as pyelftools reads them.

The check of a result compares by this reader, not by the rows that everything before it was planned
by. So a fault in the reading of those rows can't hide itself.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from elftools.elf.constants import SH_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, Section

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostSection
from pytest_negativa.gpucode.source import ByteSource


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
    for section in elf.iter_sections():
        header = section.header
        if header["sh_type"] in ("SHT_NULL", "SHT_NOBITS"):
            continue
        if isinstance(section, NoteSection):
            build_id = build_id or _find_build_id(section)
        elif isinstance(section, DynamicSection):
            for tag in section.iter_tags("DT_SONAME"):
                soname = soname or str(tag.soname)  # type: ignore[attr-defined]
        if header["sh_flags"] & SH_FLAGS.SHF_ALLOC:
            executable = bool(header["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)
            place = header["sh_offset"], header["sh_size"], header["sh_addr"]
            sections.append(HostSection(section.name, *place, executable))
    return SecondView(tuple(sections), build_id, soname)


def _find_build_id(section: NoteSection) -> str | None:
    for note in section.iter_notes():
        if note["n_type"] == "NT_GNU_BUILD_ID" and note["n_name"] == "GNU":
            return str(note["n_desc"])
    return None
