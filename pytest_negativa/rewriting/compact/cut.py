"""Cuts: which pages and sections may leave a library for its spare; libraries refused.

The library keeps every address. Pages that go leave holes in its segments. While ld.so relocates
the library, a stub (``spare/stub.c``) maps the spare into them; from then on the kernel brings the
pages in. Four segments are new, behind the others: the note with the dynamic strings and the
relocations, the stub, the dynamic section, and the program headers. Two relocations are new, of
type ``R_X86_64_IRELATIVE``, by which ld.so calls the stub.

Only code, unwind tables, data and GPU code may go, the tables that got a new place, and what
patchelf left where a table was. Of data that programs write to, what ld.so writes to stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import asdict

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.gpucode.elf import ElfTables
from pytest_negativa.gpucode.elf_tables import (
    DT_JMPREL,
    DT_NEEDED,
    DT_PLTRELSZ,
    DT_RELA,
    DT_RELACOUNT,
    DT_RELAENT,
    DT_RELASZ,
    DT_STRSZ,
    DT_STRTAB,
    DT_SYMTAB,
    DYN,
    EM_X86_64,
    PF_R,
    PF_W,
    PF_X,
    PHDR,
    PT_DYNAMIC,
    PT_LOAD,
    R_X86_64_IRELATIVE,
    RELA,
    SHT_DYNAMIC,
    DynamicEntry,
    ProgramHeader,
    Relocation,
    SectionHeader,
)
from pytest_negativa.gpucode.source import ByteSource, opened
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import (
    PAGE_SIZE,
    MovedSpan,
    Range,
    Span,
    around,
    intersection,
    minus,
    round_up,
    union,
    within,
)
from pytest_negativa.pages.note import (
    DT_NEGATIVA_NOTE,
    PROBLEMS,
    STUB_SECOND,
    STUB_SIZE,
    STUB_START,
    Hole,
    Note,
    Trailer,
    stub_for,
    trailer_offset,
    why_no_stub,
)
from pytest_negativa.rewriting.compact.compact import (
    check_identity,
    refuse_small_gain,
    write_design,
)
from pytest_negativa.rewriting.compact.new_tables import aligned, append_headers
from pytest_negativa.rewriting.compact.original_tables import (
    dynamic_rows,
    read_at,
    read_dynamic,
    read_original,
    relocated_words,
)
from pytest_negativa.rewriting.compact.pages import (
    PageMap,
    largest_holes,
    moved_segments,
    pages_without,
)
from pytest_negativa.rewriting.compact.records import CannotCompactError, Cut, Design, Spare
from pytest_negativa.rewriting.layout import Edits, FileLayout, LayoutBuilder, Patch

# With what a compiler appends to them: .text.hot, .rodata.cst32.
_CODE = re.compile(rb"\.text(\..*)?", re.DOTALL)
_CONSTANTS = re.compile(rb"\.l?rodata(\..*)?", re.DOTALL)
_OTHERS = re.compile(rb"\.l?data(\..*)?|\.eh_frame(_hdr)?|\.gcc_except_table", re.DOTALL)
# Of their tables, the library has new ones.
_MOVED = DT_STRTAB, DT_RELA, DT_JMPREL
# Alpine's musl; others' musl and Android's bionic.
_MUSL, _OTHER_LIBCS = b"libc.musl-", {b"libc.so", b"libc.so.0"}
_PIECE = 1 << 20
_REMEDY = "Put the spare beside the library, or put the original back."


@dataclass(frozen=True, slots=True)
class CutOptions:
    """The choices for cutting a library.

    Attributes:
        min_hole: bytes; smaller holes stay in the file. Each hole costs a mapping.
        max_loads: ``PT_LOAD`` headers at most. glibc keeps three records of 56 bytes for each on
            the stack of the thread that calls dlopen; 800 fit 128 KiB.
        min_gain: bytes; a library that would shrink by less stays as it is. None: any may grow.
        name: file name of the library, if ``target`` is a temporary name.
        folders: absolute paths of folders to look for the spare in, before the library's own.
        remedy: a sentence for the message of a missing spare.
    """

    min_hole: int = 16 << 10
    max_loads: int = 800
    min_gain: int | None = None
    name: str | None = None
    folders: tuple[str, ...] = ()
    remedy: str = _REMEDY


@dataclass(frozen=True, slots=True)
class _Addition:
    """The new segments: their addresses, and what they hold.

    Attributes:
        note: address of the note, and of the segment with it.
        texts: the note, and the tables of strings and relocations behind it.
        places: address and size of each new table by the address of the old one.
        stub: address of the stub.
        dynamic: address of the dynamic section, with two words behind it.
        dynamic_bytes: the section.
        headers: address of the program headers.
        messages: offsets in the strings, see ``stub_for``.
    """

    note: int
    texts: bytes
    places: dict[int | None, tuple[int, int]]
    stub: int
    dynamic: int
    dynamic_bytes: bytes
    headers: int
    messages: tuple[int, ...]


def cut_library(
    path: str | os.PathLike[str] | ByteSource,
    target: Path,
    spares: Path,
    needed: Iterable[Range],
    options: CutOptions | None = None,
    containers: Iterable[Range] = (),
    *,
    library: LibraryIdentity | None = None,
) -> Cut:
    """Write a library without the pages that nothing needs, and the spare that holds them.

    The spare gets its name first, then the library, which has the original's owner, mode,
    attributes and times.

    Args:
        path: the original, which may be open; it is only read.
        target: the new library, written by rename; it may be ``path``.
        spares: the folder of the spare.
        needed: ranges of file offsets that stay.
        options: see ``CutOptions``.
        containers: ranges of file offsets with GPU code that may go, too; see
            ``plan_edits.removable_code``.
        library: the original as it was analyzed; see ``compact_library`` for an open one.

    Raises:
        CannotCompactError: the library must stay as it is.
        StaleLibraryError: the file is not the one that was analyzed.
        FormatError: the original can't be read.
        ReconstructError: a file can't be written.
    """
    options = options or CutOptions()
    with opened(path) as source:
        if library is not None:
            check_identity(path, source, library)
        options = replace(options, name=options.name or target.name)
        design = design_cut(source, needed, options, containers)
        assert design.spare is not None, "it holds what was cut"
        note = design.spare.note
        with refusing(target, "cut", ReconstructError):
            made = write_design(source, target, design, library, spares)
    return Cut(**asdict(made), spare=spares / note.spare_name, mapped=note.mappings)


def hole_sizes(
    source: ByteSource,
    needed: Iterable[Range],
    options: CutOptions,
    containers: Iterable[Range] = (),
) -> list[int]:
    """Sizes in bytes of the holes that ``cut_library`` would make.

    Args:
        source: the original.
        needed, options, containers: see ``cut_library``.

    Raises:
        CannotCompactError: the library must stay as it is.
        FormatError: the original can't be read.
    """
    _, _, holes = _read_holes(source, needed, options, tuple(containers))
    return [end - start for start, end in holes]


def design_cut(
    source: ByteSource,
    needed: Iterable[Range],
    options: CutOptions,
    containers: Iterable[Range] = (),
) -> Design:
    """Design what ``cut_library`` would write. Nothing is written.

    Args:
        source: the original.
        needed, options, containers: see ``cut_library``.

    Raises:
        CannotCompactError: the library must stay as it is.
        FormatError: the original can't be read.
    """
    containers = union(containers)
    tables, dynamic, holes = _read_holes(source, needed, options, containers)
    if not holes:
        raise CannotCompactError(
            source.path,
            f"there is nothing to remove: no {format_bytes(options.min_hole)} in a row can leave",
        )
    pages = pages_without(tables, holes, PAGE_SIZE)
    note = Note(
        original=bytes.fromhex(source.sha256()),
        original_size=source.size,
        holes=tuple(_hole_rows(tables, holes, containers)),
        name=options.name or Path(source.path).name,
        folders=options.folders,
        remedy=options.remedy,
        restartable=b"__rseq_cs" in tables.names,
    )
    addition = _place_addition(source, tables, dynamic, note)
    builder = LayoutBuilder()
    for start, end in pages.kept:
        builder.append_copy(start, end)
    _append_tables(builder, source, tables, dynamic, pages, note, addition)
    if options.min_gain is not None:
        refuse_small_gain(source, builder.size, options.min_gain)
    spare = Spare(_spare_layout(source, tables, pages, note), note)
    return Design(builder.build(), holes, spare=spare)


def _read_holes(
    source: ByteSource,
    needed: Iterable[Range],
    options: CutOptions,
    containers: Sequence[Range],
) -> tuple[ElfTables, dict[int, int], tuple[Span, ...]]:
    """The tables of a library, its dynamic section, and what leaves it."""
    if (reason := why_no_stub()) is not None:
        raise CannotCompactError(source.path, reason)
    tables = read_original(source)
    dynamic = read_dynamic(source, tables)
    _refuse(source, tables, dynamic)
    holes = find_holes(source, tables, dynamic, needed, options, containers)
    return tables, dynamic, holes


def _refuse(source: ByteSource, tables: ElfTables, dynamic: dict[int, int]) -> None:
    """Refuse libraries that can't map their spare.

    The certificate refuses others: with relocated code, or with exported resolvers (IFUNC), which
    ld.so may run before the spare is mapped.

    Raises:
        CannotCompactError: see above.
    """
    if tables.header.e_machine != EM_X86_64:
        raise CannotCompactError(source.path, "is for another machine than x86-64")
    if not {DT_STRTAB, DT_STRSZ, DT_SYMTAB} <= dynamic.keys():
        raise CannotCompactError(
            source.path,
            "its dynamic section names no strings or no symbols (DT_STRTAB, DT_STRSZ, DT_SYMTAB)",
        )
    strings = read_at(source, tables, dynamic[DT_STRTAB], dynamic[DT_STRSZ])
    for row in dynamic_rows(source, tables):
        name = strings[row.d_val :].partition(b"\0")[0] if row.d_tag == DT_NEEDED else b""
        if name in _OTHER_LIBCS or name.startswith(_MUSL):
            raise CannotCompactError(
                source.path,
                f"needs {name.decode(errors='replace')}, and only glibc's ld.so calls the stub",
            )


# ---- What goes ----


def find_holes(
    source: ByteSource,
    tables: ElfTables,
    dynamic: dict[int, int],
    needed: Iterable[Range],
    options: CutOptions,
    containers: Sequence[Range],
) -> tuple[Span, ...]:
    """Ranges of whole pages that leave the library, by file offset, ascending.

    Args:
        source, tables, dynamic: the library.
        needed: ranges of file offsets that stay, except for dynamic strings.
        options, containers: see ``cut_library``.
    """
    fill = tuple(_fill(source, tables))
    old = ((s.sh_offset, s.file_end) for s in tables.sections if _is_moved(s, dynamic))
    moved = union((*old, *fill))
    # The unwinder's index has a segment of its own, which begins in the file. So does each segment
    # of data: the headers of its pieces cover the holes behind them.
    begins = (
        (s.p_offset, s.p_offset + 1)
        for s in tables.segments
        if s.p_type != PT_LOAD or s.p_flags & PF_W
    )
    used = around((*minus(needed, moved), *begins), PAGE_SIZE)
    free: list[Span] = []
    for load in tables.loads:
        is_data = bool(load.p_flags & PF_W)
        may_go = union((*containers, *_removable(tables, dynamic, is_data=is_data), *fill))
        # In data, the zeros behind the last byte (.bss) belong to it.
        own = list(intersection([(load.p_offset, load.file_end - is_data)], may_go))
        stays = union((*used, *_written(source, tables, load))) if is_data and own else used
        free += minus(within(own, PAGE_SIZE), stays)
    holes = sorted(hole for hole in free if hole[1] - hole[0] >= options.min_hole)
    # A table stays in the library, at its new place, so tables alone are no reason to cut.
    if not list(minus(holes, moved)):
        return ()
    return largest_holes(tables, holes, options.max_loads, zeros=False)


def _written(source: ByteSource, tables: ElfTables, load: ProgramHeader) -> tuple[Span, ...]:
    """The pages of a segment that ld.so writes to, before a page can come back."""
    words = intersection(
        relocated_words(source, tables), [(load.p_vaddr, load.p_vaddr + load.p_filesz)]
    )
    shift = load.p_vaddr - load.p_offset
    return around(((start - shift, end - shift) for start, end in words), PAGE_SIZE)


def _fill(source: ByteSource, tables: ElfTables) -> Iterator[Range]:
    """Bytes in no section: padding, and the X or Z that patchelf writes over a table it moved."""
    own = [(s.sh_offset, s.file_end) for s in tables.sections if s.loaded]
    own.append((0, tables.header.e_phoff + PHDR.size * len(tables.segments)))
    for start, end in minus(union((s.p_offset, s.file_end) for s in tables.loads), union(own)):
        pieces = (source.read(at, min(_PIECE, end - at)) for at in range(start, end, _PIECE))
        if not any(piece.strip(b"XZ\0") for piece in pieces):
            yield start, end


def _removable(tables: ElfTables, dynamic: dict[int, int], *, is_data: bool) -> Iterator[Range]:
    """Sections that may go, each with the padding behind it. Code that is data may not."""
    rows = sorted(
        (s.sh_offset, _is_moved(s, dynamic) or _leaves(name, is_data=is_data))
        for s, name in zip(tables.sections, tables.names, strict=True)
        if s.loaded
    )
    ends = [start for start, _ in rows[1:]] + [max(load.file_end for load in tables.loads)]
    for (start, goes), end in zip(rows, ends, strict=False):
        if goes:
            yield start, end


def _leaves(name: bytes, *, is_data: bool) -> bool:
    kinds = (_CONSTANTS, _OTHERS) if is_data else (_CODE, _CONSTANTS, _OTHERS)
    return any(kind.fullmatch(name) for kind in kinds)


def _is_moved(section: SectionHeader, dynamic: dict[int, int]) -> bool:
    """Whether nothing needs the old place of a section: its table gets a new one."""
    return section.sh_addr in [dynamic.get(tag) for tag in _MOVED]


def _hole_rows(
    tables: ElfTables, holes: Sequence[Range], containers: Sequence[Range]
) -> list[Hole]:
    """Rows of the note for the holes: GPU code and CPU code apart from data."""
    sections = zip(tables.sections, tables.names, strict=True)
    own = [(s.sh_offset, s.file_end) for s, name in sections if _CONSTANTS.fullmatch(name)]
    own += [(s.p_offset, s.file_end) for s in tables.loads if s.p_flags & PF_W]
    constants = around(minus(own, containers), PAGE_SIZE)
    pieces = [(*span, True) for span in intersection(holes, constants)]
    pieces += [(*span, False) for span in minus(holes, constants)]
    rows = []
    for start, end, is_constant in pieces:
        load = next(s for s in tables.loads if s.p_offset <= start < s.file_end)
        shift = load.p_vaddr - load.p_offset
        rows.append(Hole(start + shift, end + shift, start, load.protection, is_constant))
    return sorted(rows)


# ---- The new tables ----


def _place_addition(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int], note: Note
) -> _Addition:
    strings = read_at(source, tables, dynamic[DT_STRTAB], dynamic[DT_STRSZ])
    messages = []
    for problem in PROBLEMS:
        messages.append(len(strings))
        text = f"[negativa] its spare {note.spare_name} {problem}. {note.remedy}"
        strings += text.encode() + b"\0"
    start = round_up(max(load.p_vaddr + load.p_memsz for load in tables.loads), PAGE_SIZE)
    string_address = start + round_up(len(note.pack()), 16)
    relocations = string_address + round_up(len(strings), 16)
    rows, before, jump_slots = _relocations(source, tables, dynamic)
    stub = round_up(relocations + len(rows), PAGE_SIZE)
    dynamic_address = stub + STUB_SIZE
    changed = {
        DT_STRTAB: string_address,
        DT_STRSZ: len(strings),
        DT_RELA: relocations,
        DT_RELASZ: dynamic.get(DT_RELASZ, 0) + 2 * RELA.size,
        DT_RELAENT: RELA.size,
        **({DT_JMPREL: relocations + jump_slots} if DT_JMPREL in dynamic else {}),
        DT_NEGATIVA_NOTE: start,
    }
    same = (row for row in dynamic_rows(source, tables) if row.d_tag not in changed)
    section = b"".join(map(DYN.pack, (*same, *map(DynamicEntry._make, changed.items()))))
    section += bytes(DYN.size)
    own = b"".join(
        RELA.pack(Relocation(dynamic_address + len(section) + at, R_X86_64_IRELATIVE, stub + place))
        for at, place in ((0, STUB_START), (8, STUB_SECOND))
    )
    texts = note.pack().ljust(string_address - start, b"\0") + strings
    texts = texts.ljust(relocations - start, b"\0")
    return _Addition(
        note=start,
        texts=texts + rows[:before] + own + rows[before + len(own) :],
        places={
            dynamic[DT_STRTAB]: (string_address, len(strings)),
            dynamic.get(DT_RELA): (relocations, changed[DT_RELASZ]),
            dynamic.get(DT_JMPREL): (relocations + jump_slots, dynamic.get(DT_PLTRELSZ, 0)),
        },
        stub=stub,
        dynamic=dynamic_address,
        dynamic_bytes=section,
        headers=round_up(dynamic_address + len(section) + 16, PAGE_SIZE),
        messages=tuple(messages),
    )


def _relocations(
    source: ByteSource, tables: ElfTables, dynamic: dict[int, int]
) -> tuple[bytes, int, int]:
    """All relocations in one piece, with room for ours; its place; that of the jump slots.

    Ours come before all others that call functions, since those may lie in holes. glibc before 2.23
    takes jump slots that lie directly behind the others for a part of them, so all stay together.
    """
    rows, room = b"", bytes(2 * RELA.size)
    if DT_RELA in dynamic:
        rows = read_at(source, tables, dynamic[DT_RELA], dynamic.get(DT_RELASZ, 0))
    before = dynamic.get(DT_RELACOUNT, 0) * RELA.size
    jump_slots = dynamic.get(DT_JMPREL, 0) - dynamic.get(DT_RELA, 0)
    if jump_slots not in range(len(rows)):
        jump_slots = len(rows)
        if DT_JMPREL in dynamic:
            rows += read_at(source, tables, dynamic[DT_JMPREL], dynamic.get(DT_PLTRELSZ, 0))
    return rows[:before] + room + rows[before:], before, jump_slots + len(room)


def _append_tables(
    builder: LayoutBuilder,
    source: ByteSource,
    tables: ElfTables,
    dynamic: dict[int, int],
    pages: PageMap,
    note: Note,
    addition: _Addition,
) -> None:
    others = list(moved_segments(tables, pages, zeros=False))
    symbols = dynamic[DT_SYMTAB]
    load = next(
        s for s in others if s.p_type == PT_LOAD and s.p_vaddr <= symbols < s.p_vaddr + s.p_filesz
    )
    first = load.p_vaddr - load.p_vaddr % PAGE_SIZE
    stub = stub_for(
        own=addition.stub,
        note=addition.note,
        symbols=symbols,
        symbols_start=first,
        symbols_size=round_up(load.p_vaddr + load.p_filesz, PAGE_SIZE) - first,
        headers=addition.headers,
        header_count=len(others) + 4,
        messages=addition.messages,
    )
    new: list[ProgramHeader] = []
    for flags, address, data in (
        (PF_R, addition.note, addition.texts),
        (PF_R | PF_X, addition.stub, stub),
        (PF_R | PF_W, addition.dynamic, addition.dynamic_bytes + bytes(16)),
    ):
        offset, size = builder.append(data, PAGE_SIZE), len(data)
        new.append(ProgramHeader(PT_LOAD, flags, offset, address, address, size, size, PAGE_SIZE))
    texts_load, _, dynamic_load = new
    segments = [
        dynamic_load._replace(
            p_type=PT_DYNAMIC,
            p_filesz=len(addition.dynamic_bytes),
            p_memsz=len(addition.dynamic_bytes),
            p_align=segment.p_align,
        )
        if segment.p_type == PT_DYNAMIC
        else segment
        for segment in others
    ]
    moved = {}
    for index, section in enumerate(tables.sections):
        if section.sh_type == SHT_DYNAMIC:
            moved[index] = section._replace(
                sh_addr=addition.dynamic,
                sh_offset=dynamic_load.p_offset,
                sh_size=len(addition.dynamic_bytes),
            )
        elif _is_moved(section, dynamic):
            address, size = addition.places[section.sh_addr]
            offset = texts_load.p_offset + address - addition.note
            moved[index] = section._replace(sh_addr=address, sh_offset=offset, sh_size=size)
    append_headers(
        builder,
        source,
        tables,
        pages,
        aligned(source, tables, (*segments, *new)),
        strip=True,
        moved=moved,
        spare=note.spare_name,
        loaded_at=addition.headers,
    )


# ---- The spare ----


def _spare_layout(source: ByteSource, tables: ElfTables, pages: PageMap, note: Note) -> FileLayout:
    """The bytes of the original that the library has not unchanged, and the trailer.

    Unchanged are all of its pages but the first, and of that the program headers. A loader that
    takes the spare for a library finds none, and refuses it. Profilers find the build id there.
    """
    headers = tables.header.e_phoff
    unchanged = union(
        [(headers, headers + PHDR.size * len(tables.segments)), (PAGE_SIZE, source.size)]
    )
    kept = tuple(intersection(pages.kept, unchanged))
    moved = tuple(MovedSpan(*span, pages.offset_of(span.start)) for span in kept)
    own = minus([(0, source.size)], kept)
    data = Trailer(note.pair, note.original, source.size, moved).pack()
    start = trailer_offset(source.size)
    return FileLayout(
        tuple(MovedSpan(*span, span.start) for span in own),
        Edits.of(start + len(data), [Patch(start, data)]),
    )
