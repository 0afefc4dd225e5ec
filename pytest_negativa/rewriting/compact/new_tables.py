"""Tables of a compacted library: headers, stripped sections, marker; what stands for a moved one.

The program header table comes behind everything that is mapped, in a page of its own. glibc takes
a table within the last page of a PT_LOAD for mapped. If ld.so clears that page's end, the table is
gone, and the first exception ends the process. GNU strip refuses such a file. A library with a
spare changes its table in memory (``spare/stub.c``), so there it is a segment of its own.

Symbols name sections by index, so section indices stay. A dropped section becomes SHT_NULL.

A section with holes stays whole, without bytes of the file (SHT_NOBITS). Its pieces come behind all
others. Tools that set uprobes take st_value - sh_addr + sh_offset for a symbol's place in the file.
That holds for whole sections only. So a section without bytes lies at ``FAR``, and its symbols past
the end of any file. Some tools, such as cuobjdump, find a section by its name, so the pieces have
it. Others, such as patchelf, take the name for the symbols' section, so the whole has a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from pytest_negativa.gpucode.elf import MARKER, ElfTables
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    PF_R,
    PHDR,
    PT_LOAD,
    SHDR,
    SHF_ALLOC,
    SHF_TLS,
    SHT_NOBITS,
    SHT_NULL,
    SHT_PROGBITS,
    SHT_STRTAB,
    ProgramHeader,
    SectionHeader,
)
from pytest_negativa.gpucode.slimmed import WHOLE, Marker
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.pages import PageMap
from pytest_negativa.rewriting.compact.records import CannotCompactError
from pytest_negativa.rewriting.layout import LayoutBuilder, Patch

FAR = 1 << 33
"""Offset of sections that have no bytes in the file: behind any file, also if tools add to it. Some
tools (eu-strip) write a sparse file of this size."""

_STRIPPED = re.compile(rb"\.symtab|\.strtab|\.debug.*", re.DOTALL)
_NO_SECTION = SectionHeader(0, SHT_NULL, 0, 0, 0, 0, 0, 0, 0, 0)


def append_headers(
    builder: LayoutBuilder,
    source: ByteSource,
    tables: ElfTables,
    pages: PageMap,
    segments: tuple[ProgramHeader, ...],
    *,
    strip: bool,
    moved: Mapping[int, SectionHeader] | None = None,
    spare: str | None = None,
    loaded_at: int | None = None,
) -> None:
    """Append sections that are never loaded, and the tables, behind the pages that stay.

    Args:
        builder: has the pages; also gets the new ELF header.
        source: the library.
        tables: its tables.
        pages: its pages that stay.
        segments: the new program headers.
        strip: drop symbols and debug information.
        moved: headers of loaded sections that have got another address, by index.
        spare: name of the file that has the rest, if there is one.
        loaded_at: address of the program headers, which get a segment of their own; None: they are
            not loaded.
    """
    if loaded_at is not None:
        place = -(-builder.size // pages.page_size) * pages.page_size
        size = PHDR.size * (len(segments) + 1)
        load = ProgramHeader(
            PT_LOAD, PF_R, place, loaded_at, loaded_at, size, size, pages.page_size
        )
        segments = (*segments, load)
    phoff = builder.append(b"".join(PHDR.pack(s) for s in segments), pages.page_size)
    marker = msgspec.json.encode(Marker(size_before=source.size, spare=spare))
    sections, names_index = _add_sections(
        builder, marker, tables, pages, strip=strip, moved=moved or {}
    )
    shoff = builder.append(b"".join(SHDR.pack(s) for s in sections), 8)
    header = tables.header._replace(
        e_phoff=phoff,
        e_shoff=shoff,
        e_phnum=len(segments),
        e_shnum=len(sections),
        e_shstrndx=names_index,
    )
    builder.change(Patch(0, EHDR.pack(header)))


def aligned(
    source: ByteSource, tables: ElfTables, segments: tuple[ProgramHeader, ...]
) -> tuple[ProgramHeader, ...]:
    """The segments, with the load address as aligned as before.

    From glibc 2.35 on the load address is a multiple of the largest p_align of all PT_LOADs. Data
    aligned to more than a page has such a segment. If its new offset no longer allows that p_align,
    another PT_LOAD states it, as a rule the first, of address and offset 0.
    """
    largest = max(load.p_align for load in tables.loads)
    loads = [(at, s) for at, s in enumerate(segments) if s.p_type == PT_LOAD]
    if max(load.p_align for _, load in loads) >= largest:
        return segments
    for at, load in loads:
        if (load.p_vaddr - load.p_offset) % largest == 0:
            return (*segments[:at], load._replace(p_align=largest), *segments[at + 1 :])
    raise CannotCompactError(
        source.path, f"the alignment of its load address, {largest:#x}, can't be kept"
    )


def _add_sections(
    builder: LayoutBuilder,
    marker: bytes,
    tables: ElfTables,
    pages: PageMap,
    *,
    strip: bool,
    moved: Mapping[int, SectionHeader],
) -> tuple[list[SectionHeader], int]:
    """The new section headers, and the index of the section with their names."""
    kept = _kept_unloaded(tables, strip=strip)
    names = list(tables.names)
    sections: list[SectionHeader] = []
    later: list[tuple[bytes, SectionHeader]] = []
    for index, section in enumerate(tables.sections):
        if section.sh_type == SHT_NULL or (
            index == tables.header.e_shstrndx and not section.loaded
        ):
            new = section
        elif index in moved:
            new = moved[index]
        elif section.loaded and section.sh_size:
            pieces = list(_pieces(section, pages))
            if [piece.sh_size for piece in pieces] == [section.sh_size]:
                new = pieces.pop()
            else:
                new = section._replace(sh_type=SHT_NOBITS, sh_offset=FAR + section.sh_offset)
            if pieces:
                later += ((names[index], piece) for piece in pieces)
                names[index] = WHOLE.encode() + names[index]
        elif section.sh_flags & SHF_ALLOC:
            near = section.in_file or section.sh_flags & SHF_TLS
            new = section._replace(
                sh_offset=pages.nearest_offset(section.sh_offset) if near else FAR
            )
        elif index in kept:
            new = _copy_unloaded(builder, section)
        else:
            new = _NO_SECTION
            names[index] = b""
        sections.append(new)
    later.append((MARKER, _unloaded(SHT_PROGBITS, builder.append(marker), len(marker))))
    for name, piece in later:
        names.append(name)
        sections.append(piece)
    return sections, _add_names(builder, sections, tables, names)


def _kept_unloaded(tables: ElfTables, *, strip: bool) -> set[int]:
    """Indices of the sections that are never loaded and stay, with those they link to.

    Symbols and debug information go. Other tools may need any other section: the compiler's
    version (``.comment``), SystemTap's probes, the place of the debug information
    (``.gnu_debuglink``), and sections of any name that we don't know.
    """
    unloaded = {
        i
        for i, s in enumerate(tables.sections)
        if s.sh_type != SHT_NULL and not s.sh_flags & SHF_ALLOC and i != tables.header.e_shstrndx
    }
    if not strip:
        return unloaded
    wanted = [i for i in unloaded if not _STRIPPED.fullmatch(tables.names[i])]
    wanted += [s.sh_link for s in tables.sections if s.sh_flags & SHF_ALLOC]
    kept: set[int] = set()
    while wanted:
        index = wanted.pop()
        if index in unloaded and index not in kept:
            kept.add(index)
            wanted.append(tables.sections[index].sh_link)
    return kept


def _pieces(section: SectionHeader, pages: PageMap) -> Iterator[SectionHeader]:
    for start, end in pages.pieces(section.sh_offset, section.file_end):
        alignment = section.sh_addralign
        yield section._replace(
            sh_addr=section.sh_addr + start - section.sh_offset,
            sh_offset=pages.offset_of(start),
            sh_size=end - start,
            sh_addralign=alignment
            if start == section.sh_offset
            else min(alignment, pages.page_size),
        )


def _copy_unloaded(builder: LayoutBuilder, section: SectionHeader) -> SectionHeader:
    if not section.in_file:
        return section._replace(sh_offset=builder.size)
    alignment = max(section.sh_addralign, 1)
    # The field may hold anything; a section that is never loaded needs no more than a page.
    alignment = alignment if alignment <= 4096 else 1
    start = builder.append_copy(section.sh_offset, section.file_end, alignment)
    return section._replace(sh_offset=start)


def _add_names(
    builder: LayoutBuilder, sections: list[SectionHeader], tables: ElfTables, names: list[bytes]
) -> int:
    """Write the names of all sections; returns the index of the section that holds them."""
    own = sections[tables.header.e_shstrndx]
    index = tables.header.e_shstrndx
    # A loaded section of names may have another use: it stays, and the names get a new section.
    if own.loaded:
        index = len(sections)
        names.append(b".shstrtab")
        sections.append(own)
    table = bytearray(b"\0")
    places = {b"": 0}
    for at, name in enumerate(names):
        if name not in places:
            places[name] = len(table)
            table += name + b"\0"
        sections[at] = sections[at]._replace(sh_name=places[name])
    start = builder.append(bytes(table))
    header = _unloaded(SHT_STRTAB, start, len(table))._replace(sh_name=places[names[index]])
    sections[index] = header
    return index


def _unloaded(kind: int, offset: int, size: int) -> SectionHeader:
    return SectionHeader(0, kind, 0, 0, offset, size, 0, 0, 1, 0)
