"""Tells whether a file is a compacted library, and whether another tool has damaged it since.

GNU strip refuses compacted libraries. llvm-objcopy 14 accepts them and moves the program headers
into the last page of a segment. ld.so then takes the headers for mapped, and clears them with the
end of that page. The unwinder finds no table any more, and the first exception ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf_tables import (
    DT_STRTAB,
    DT_SYMTAB,
    EHDR,
    PHDR,
    PT_GNU_EH_FRAME,
    PT_LOAD,
)
from pytest_negativa.gpucode.slimmed import MARKER, MARKER_VERSION, SOUND_VERSIONS
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.dynamic import read_dynamic
from pytest_negativa.rewriting.compact.original_tables import ElfTables, read_at, read_tables
from pytest_negativa.rewriting.compact.records import CannotCompactError

_REMEDY = "make it again from the original"
_HEADERS_MOVED = (
    "its program headers were moved into the last page of a segment, where ld.so clears them: "
    "exceptions would end the process"
)
_SMALLEST_PAGE = 4096
# Longer than what we write.
_MAX_MARKER = 4096


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whether a file is a compacted library, and its damage.

    Attributes:
        compacted: whether the file is, or was, a compacted library.
        damage: what is wrong and what to do; None if nothing was found.
    """

    compacted: bool
    damage: str | None = None


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Look for the damage that tools are known to do to compacted libraries.

    Raises:
        FormatError: the file can't be opened.
    """
    with ByteSource(path) as source:
        try:
            tables = read_tables(source)
        except (CannotCompactError, FormatError) as e:
            # The tables are unreadable; only the marker's text can identify the file.
            problem = e.reason if isinstance(e, CannotCompactError) else e.problem
            if not _ends_with_marker(source):
                return Diagnosis(compacted=False)
            with contextlib.suppress(FormatError):
                problem = _HEADERS_MOVED if _headers_moved(source) else problem
            return Diagnosis(True, f"{problem}; {_REMEDY}")
        if MARKER not in tables.names:
            return Diagnosis(compacted=False)
        try:
            moved = _headers_moved(source)
            damage = _HEADERS_MOVED if moved else _find_damage(source, tables)
        except (CannotCompactError, FormatError) as e:
            damage = e.reason if isinstance(e, CannotCompactError) else e.problem
        return Diagnosis(True, None if damage is None else f"{damage}; {_REMEDY}")


def _ends_with_marker(source: ByteSource) -> bool:
    # Behind it are the names and headers of the sections.
    size = min(source.size, 1 << 20)
    return b'"load_segments_before": ' in source.read(source.size - size, size)


def _headers_moved(source: ByteSource) -> bool:
    """Whether the program headers lie behind a segment's bytes, in the same page.

    Asked first, and of the bare rows: a tool that moves them may damage other tables, too.
    """
    header = EHDR.unpack_from(source.read(0, EHDR.size))
    phoff, end = header.e_phoff, header.e_phoff + PHDR.size * header.e_phnum
    for load in PHDR.iter_unpack(source.read(phoff, end - phoff)):
        mapped_end = load.file_end + -(load.p_vaddr + load.p_filesz) % _SMALLEST_PAGE
        inside = load.p_offset <= phoff and end <= load.file_end
        overlap = load.p_filesz and load.p_offset < end and phoff < mapped_end
        if load.p_type == PT_LOAD and overlap and not inside:
            return True
    return False


def _find_damage(source: ByteSource, tables: ElfTables) -> str | None:
    section = tables.sections[tables.names.index(MARKER)]
    try:
        facts = json.loads(source.read(section.sh_offset, min(section.sh_size, _MAX_MARKER)))
        version, segments = facts["compacted"], facts["load_segments"]
    except (ValueError, KeyError, TypeError):
        return "its section .negativa is damaged"
    if version not in SOUND_VERSIONS:
        return f"its section .negativa has version {version}, this release knows {MARKER_VERSION}"
    if len(tables.loads) < segments:
        return f"it has {len(tables.loads)} PT_LOADs of {segments} that it had"
    for segment in tables.segments:
        if segment.p_type == PT_GNU_EH_FRAME and source.read(segment.p_offset, 1) != b"\x01":
            return "its unwinding table is gone"
    dynamic = read_dynamic(source, tables)
    for tag in (DT_STRTAB, DT_SYMTAB):
        if tag not in dynamic or read_at(source, tables, dynamic[tag], 1) != b"\0":
            return "its dynamic symbols are gone"
    return None
