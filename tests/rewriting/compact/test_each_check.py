"""Each check of the certificate has a fault that it finds, and says so in its own words.

Faults are planted into sound results, by places in their tables. Checks without a fault here have
one in ``test_certify``.
"""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from pytest_negativa.gpucode.elf_tables import EM_AARCH64
from pytest_negativa.rewriting.compact.compact import PROGRAM
from tests.support.compacting import needs_compiler, relocations_supported
from tests.support.corrupting import (
    DYN,
    HOLE,
    KEPT,
    NOTE,
    PHDR,
    PT_DYNAMIC,
    PT_LOAD,
    SHDR,
    SYM,
    TRAILER,
    note_of,
    view,
)
from tests.support.cutting import needs_stub
from tests.support.sound import Sound, compacted

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not PROGRAM.is_file(), reason="the program that certifies was not built"),
]
PT_NOTE, GNU_STACK, FUNC, GNU_IFUNC = 4, 0x6474E551, 2, 10
# Columns of a program header, a section header, a hole, a symbol: where they are, and their bytes.
TYPE, FLAGS, OFFSET, VADDR, FILESZ, MEMSZ, ALIGN = (
    (0, 4), (4, 4), (8, 8), (16, 8), (32, 8), (40, 8), (48, 8),
)  # fmt: skip
SH_NAME, SH_TYPE, SH_FLAGS, SH_ADDR, SH_OFFSET, SH_SIZE = (
    (0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8),
)  # fmt: skip
START, END, IN_FILE, PROTECTION, CONSTANTS = (0, 8), (8, 8), (16, 8), (24, 4), (28, 4)
INFO, SHNDX, VALUE = (4, 1), (6, 2), (8, 8)
# Places in the ELF header.
PHOFF, SHOFF, PHENTSIZE, PHNUM, SHENTSIZE, SHNUM, SHSTRNDX = (
    (32, 8), (40, 8), (54, 2), (56, 2), (58, 2), (60, 2), (62, 2),
)  # fmt: skip
Column = tuple[int, int]


class Binary(bytearray):
    """A library that a fault changes."""

    @property
    def names(self) -> list[str]:
        return [section.name for section in ELFFile(io.BytesIO(self)).iter_sections()]

    def get(self, at: int, column: Column) -> int:
        return int.from_bytes(self[at + column[0] : at + sum(column)], "little")

    def set(self, at: int, column: Column, value: int) -> None:
        new = (value % (1 << 8 * column[1])).to_bytes(column[1], "little")
        self[at + column[0] : at + sum(column)] = new

    def add(self, at: int, column: Column, value: int) -> None:
        self.set(at, column, self.get(at, column) + value)

    def segment(self, number: int, kind: int = PT_LOAD) -> int:
        """Place of the number-th program header of a type."""
        tables = view(bytes(self))
        rows = [i for i, row in enumerate(tables.segments) if row[0] == kind]
        return tables.phoff + rows[number] * PHDR.size

    def section(self, name: str, number: int = 0) -> int:
        """Place of the number-th section header of a name."""
        rows = [i for i, found in enumerate(self.names) if found == name]
        return view(bytes(self)).shoff + rows[number] * SHDR.size

    def dynamic(self, tag: int) -> int:
        """Place of a row of the dynamic section."""
        at = self.get(self.segment(0, PT_DYNAMIC), OFFSET)
        while (found := self.get(at, (0, 8))) != tag:
            assert found, f"no row of tag {tag:#x}"
            at += DYN.size
        return at

    def value(self, tag: int) -> int:
        """Value of a row of the dynamic section."""
        return self.get(self.dynamic(tag), (8, 8))

    def place(self, address: int) -> int:
        """File offset of an address."""
        return view(bytes(self)).offset(address)


@dataclass
class Files:
    """What the certificate is asked about."""

    original: Binary
    library: Binary
    spare: Binary
    declared: str
    sha256: str = ""

    @classmethod
    def of(cls, case: Sound) -> Files:
        original = Binary(case.original.read_bytes())
        return cls(original, Binary(case.pair.library), Binary(case.pair.spare), case.declared)

    def ask(self, folder: Path) -> subprocess.CompletedProcess[str]:
        words: list[str] = []
        for name in ("original", "library", "spare"):
            data: Binary = getattr(self, name)
            (folder / name).write_bytes(data)
            words.append(str(folder / name) if data else "")
        return subprocess.run(
            [PROGRAM, *words, self.sha256],
            input=self.declared, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip

    def both(self, at: int, new: bytes) -> None:
        """Change bytes of the original, and of the result in the same way."""
        self.original[at : at + len(new)] = new
        for row in view(bytes(self.original)).segments:
            if row[0] == PT_LOAD and row[2] <= at < row[2] + row[5]:
                place = self.library.place(at - row[2] + row[3])
                self.library[place : place + len(new)] = new
        if self.spare:
            self.spare[at : at + len(new)] = new
            self.seal()

    def seal(self) -> None:
        """Let all digests agree again."""
        note = note_of(bytes(self.library))
        assert note is not None
        at = note.at + note.head[7]
        original = hashlib.sha256(self.original).digest()
        pair = hashlib.sha256(original + self.library[at:][: len(note.holes) * HOLE.size]).digest()
        self.library[note.at + 16 : note.at + 80] = pair + original
        name, now = note.pair.hex()[:16].encode(), pair.hex()[:16].encode()
        self.library = Binary(self.library.replace(name, now))
        self.spare[self.trailer + 16 : self.trailer + 80] = pair + original

    @property
    def trailer(self) -> int:
        """Place of the spare's trailer."""
        return -(-len(self.original) // 4096) * 4096

    @property
    def note(self) -> int:
        note = note_of(bytes(self.library))
        assert note is not None
        return note.at

    def hole(self, number: int, column: Column, value: int) -> None:
        """Add to a column of a hole."""
        note = note_of(bytes(self.library))
        assert note is not None
        at = note.at + note.head[7] + number % len(note.holes) * HOLE.size
        self.library.add(at, column, value)
        self.seal()

    def kept(self, number: int, column: int, value: int) -> None:
        """Add to a column of a row of the spare."""
        at = self.trailer + TRAILER.size + number * KEPT.size
        self.spare.add(at, (column * 8, 8), value)

    def line(self, kind: str, number: int = 0) -> tuple[int, int]:
        """Start and end of something that was declared."""
        rows = [line.split() for line in self.declared.splitlines()]
        row = [row for row in rows if row[0] == kind][number]
        return int(row[1]), int(row[2])

    def append_segments(self, *rows: tuple[int, ...], number: int | None = None) -> None:
        """Give the library more program headers, or others than one, behind all of its bytes."""
        segments = view(bytes(self.library)).segments
        at = len(segments) if number is None else number
        segments[at : at + 1] = rows
        place = -(-len(self.library) // 65536) * 65536
        self.library.extend(bytes(place - len(self.library)))
        self.library.extend(b"".join(PHDR.pack(*row) for row in segments).ljust(4096, b"\0"))
        self.library.set(0, PHOFF, place)
        self.library.set(0, PHNUM, len(segments))

    def address(self, offset: int) -> int:
        """Address of a byte of the original."""
        rows = view(bytes(self.original)).segments
        load = next(r for r in rows if r[0] == PT_LOAD and r[2] <= offset < r[2] + r[5])
        return offset - load[2] + load[3]

    def at(self, offset: int) -> int:
        """Place in the library of a byte of the original."""
        return self.library.place(self.address(offset))


Fault = Callable[[Files], None]


def header(column: Column, value: int) -> Fault:
    return lambda f: f.library.set(0, column, value)


def segment(number: int, column: Column, value: int, kind: int = PT_LOAD) -> Fault:
    """Add to a column of a program header."""
    return lambda f: f.library.add(f.library.segment(number, kind), column, value)


def section(name: str, column: Column, value: int, number: int = 0) -> Fault:
    """Add to a column of a section header."""
    return lambda f: f.library.add(f.library.section(name, number), column, value)


def row(tag: int, value: int) -> Fault:
    """Add to a value of the dynamic section."""
    return lambda f: f.library.add(f.library.dynamic(tag), (8, 8), value)


def flip(tag: int, offset: int = 0, size: int | None = None) -> Fault:
    """Change a byte of a table that the dynamic section names; its size has another tag."""

    def changed(f: Files) -> None:
        at = f.library.place(f.library.value(tag)) + offset
        f.library[at + (f.library.value(size) if size else 0)] ^= 0x40

    return changed


def note(column: Column, value: int) -> Fault:
    """Add to a column of the note."""
    return lambda f: f.library.add(f.note, column, value)


def hole(number: int, column: Column, value: int) -> Fault:
    return lambda f: f.hole(number, column, value)


def kept(number: int, column: int, value: int) -> Fault:
    return lambda f: f.kept(number, column, value)


def trailer(column: Column, value: int) -> Fault:
    return lambda f: f.spare.add(f.trailer, column, value)


def declare(text: str) -> Fault:
    def changed(f: Files) -> None:
        f.declared += text + "\n"

    return changed


def both(at: int, new: bytes) -> Fault:
    return lambda f: f.both(at, new)


def all_of(*faults: Fault) -> Fault:
    def changed(f: Files) -> None:
        for fault in faults:
            fault(f)

    return changed


def ends_at(name: str, size: int) -> Fault:
    return lambda f: setattr(f, name, getattr(f, name)[:size])


def longer(name: str, size: int) -> Fault:
    return lambda f: getattr(f, name).extend(bytes(size))


def byte(name: str, at: int) -> Fault:
    def changed(f: Files) -> None:
        getattr(f, name)[at] ^= 1

    return changed


def given(name: str, value: str) -> Fault:
    return lambda f: setattr(f, name, value)


def more_segments(*rows: tuple[int, ...]) -> Fault:
    return lambda f: f.append_segments(*rows)


def stub(offset: int) -> Fault:
    """Add to a byte of the code that maps the spare, or of its parameters."""
    return lambda f: f.library.add(f.library.get(f.library.segment(-3), OFFSET), (offset, 1), 8)


def note_text(column: int, offset: int) -> Fault:
    """Add to a letter of a text whose place the note has in a column."""
    return lambda f: f.library.add(f.note + f.library.get(f.note, (column, 4)), (offset, 1), 1)


def another_hole(number: int, size: int) -> Fault:
    """One more row of the note, with as much less of its last text."""

    def changed(f: Files) -> None:
        note = note_of(bytes(f.library))
        assert note is not None
        rows, end = note.at + NOTE.size, note.at + note.head[12] + 1
        at, start = rows + number * HOLE.size, note.holes[0][0] if not size else 1 << 30
        row = HOLE.pack(start, start + size, start, *note.holes[0][3:])
        f.library[at : end + HOLE.size] = row + f.library[at : end - 1] + b"\0"
        f.library.add(f.note, (100, 4), 1)
        for column in (104, 108, 112, 116):
            f.library.add(f.note, (column, 4), HOLE.size)
        f.seal()

    return changed


def a_row_of_another_kind(f: Files) -> None:
    f.library.set(f.library.dynamic(10), (0, 8), 21)


def a_row_of_a_known_kind(f: Files) -> None:
    """It could be the jump slots of an original that has none: ld.so would take them."""
    segment, load = f.library.segment(0, PT_DYNAMIC), f.library.segment(-2)
    for at in (segment, load):
        f.library.add(at, FILESZ, DYN.size)
        f.library.add(at, MEMSZ, DYN.size)
    f.library.add(f.library.section(".dynamic"), SH_SIZE, DYN.size)
    # What the stub's functions return lies behind.
    ours = f.library.place(f.library.value(7)) + 24 * f.library.value(0x6FFFFFF9)
    for row_of_ours in (ours, ours + 24):
        f.library.add(row_of_ours, (0, 8), DYN.size)
    at = f.library.dynamic(7)
    while f.library.get(at, (0, 8)):
        at += DYN.size
    f.library[at : at + DYN.size] = f.library[f.library.dynamic(7) :][: DYN.size]
    f.library[at + DYN.size : at + 3 * DYN.size] = bytes(2 * DYN.size)


def a_note_without_holes(f: Files) -> None:
    f.library.set(f.note, (100, 4), 0)


def symbols_without_a_section(f: Files) -> None:
    for data in (f.original, f.library):
        data.set(data.section(".dynsym"), SH_TYPE, 1)


def a_last_page_far_away(f: Files) -> None:
    """Behind the addresses that a process has; the stub knows of it."""
    last = view(bytes(f.library)).segments
    number = sum(r[0] == PT_LOAD for r in last) - 1
    f.library.set(f.library.segment(number), VADDR, 1 << 47)
    stub = f.library.get(f.library.segment(number - 2), OFFSET)
    f.library.set(stub, (40, 8), 1 << 47)


def a_dynamic_section_without_an_end(f: Files) -> None:
    """Its last row is where ld.so writes what the stub's functions return."""
    segment, load = f.library.segment(0, PT_DYNAMIC), f.library.segment(-2)
    rows = f.library.get(segment, FILESZ) - f.library.dynamic(0) + f.library.get(segment, OFFSET)
    for at in (segment, load):
        f.library.add(at, FILESZ, -rows)
        f.library.add(at, MEMSZ, -rows)
    f.library.add(f.library.section(".dynamic"), SH_SIZE, -rows)
    first = f.library.place(f.library.value(7))
    count = f.original.value(0x6FFFFFF9) if f.spare else 0
    for i in range(2):
        f.library.add(first + (count + i) * 24, (0, 8), -rows)


def a_hole_that_begins_within_a_page(f: Files) -> None:
    """The kernel maps no such pages."""
    start = first_hole(f)
    tables = view(bytes(f.library))
    number = next(
        i for i, r in enumerate(tables.segments) if r[0] == PT_LOAD and r[3] + r[6] == start
    )
    before = tables.phoff + number * PHDR.size
    words = f.library[f.library.place(start - 8) :][:8]
    for column in (FILESZ, MEMSZ):
        f.library.add(before, column, -8)
    f.hole(0, START, -8)
    f.hole(0, IN_FILE, -8)
    end = f.original.place(start)
    f.spare[end - 8 : end] = words


def a_page_of_the_spare_that_the_library_has(f: Files) -> None:
    """Both give the original back, but the hole gets zeros."""
    page = f.original.place(first_hole(f))
    f.library.extend(f.spare[page : page + 4096])
    f.spare[page : page + 4096] = bytes(4096)
    rows = list(KEPT.iter_unpack(f.spare[f.trailer + TRAILER.size :]))
    rows = sorted([*rows, (page, page + 4096, len(f.library) - 4096)])
    f.spare.set(f.trailer, (12, 4), len(rows))
    f.spare[f.trailer + TRAILER.size :] = b"".join(KEPT.pack(*r) for r in rows)


def program_headers_on_a_loaded_page(f: Files) -> None:
    """Behind the bytes of a segment, where its page would have zeros."""
    tables = view(bytes(f.library))
    rows = b"".join(PHDR.pack(*r) for r in tables.segments)
    at = next(
        r[2] + r[5]
        for r in tables.segments
        if r[0] == PT_LOAD
        and r[5]
        and -(r[2] + r[5]) % 4096 >= len(rows)
        and not any(f.library[r[2] + r[5] : r[2] + r[5] + len(rows)])
    )
    f.library[at : at + len(rows)] = rows
    f.library.set(0, PHOFF, at)


def a_region_that_ends_early(f: Files) -> None:
    """In the library and as declared; the driver doesn't find the kept element behind."""
    start, end = f.line("region", 6)
    (first, kept), (behind, _) = f.line("unused", 13), f.line("unused", 14)
    f.declared = f.declared.replace(f"region {start} {end}", f"region {start} {kept}")
    f.library.set(f.at(start), (8, 8), kept - first)
    place = f.at(behind)
    f.library[place : place + 64] = bytes(64)


def a_region_that_is_shorter(f: Files) -> None:
    f.library.add(f.at(f.line("region", 6)[0]), (8, 8), -8)


def a_trimmed_cubin_of_another_digest(f: Files) -> None:
    """Of kept code between two elements that are gone."""
    f.declared += f"trimmed {f.line('unused', 1)[1]} {f.line('unused', 2)[0]} 00\n"


def two_elements_that_are_declared_as_one(f: Files) -> None:
    """So that a header may be overwritten, by which the driver finds the second."""
    (start, middle), (_, end) = f.line("unused", 14), f.line("unused", 15)
    f.declared = f.declared.replace(f"{start} {middle}\nunused {middle} {end}", f"{start} {end}")
    f.library = Binary(f.original)
    f.library[middle:end] = b"\1" * (end - middle)


def pieces_of_small_pages(f: Files) -> None:
    """A segment in two, the second at no page of this size."""
    f.both(18, EM_AARCH64.to_bytes(2, "little"))
    f.library = Binary(f.original)
    rows = enumerate(view(bytes(f.library)).segments)
    number, load = next((i, r) for i, r in rows if r[0] == PT_LOAD and r[5] > 1 << 16)
    rest = (*load[:2], *(v + 4096 for v in load[2:5]), load[5] - 4096, load[6] - 4096, load[7])
    f.append_segments((*load[:5], 4096, 4096, load[7]), rest, number=number)


def a_longer_original(f: Files) -> None:
    """Whoever asks says that it is the one."""
    f.sha256 = hashlib.sha256(f.original).hexdigest()
    f.original.append(0)


def a_header_that_is_not_loaded(f: Files) -> None:
    for data in (f.original, f.library):
        data.set(data.segment(0), TYPE, 5)
    f.library.add(0, (24, 8), 1)


def a_piece_in_the_place_of_the_next(f: Files) -> None:
    """Of the same size, so that the section has as many bytes as before."""
    one, other = f.library.section(".text", 0), f.library.section(".text", 1)
    f.library[one : one + SHDR.size] = f.library[other : other + SHDR.size]


def a_piece_in_two(f: Files) -> None:
    """Tools that read section by section would see an end in the middle of the code."""
    at, count = f.library.section(".text", 0), f.library.get(0, SHNUM)
    rows = bytearray(f.library[f.library.get(0, SHOFF) :][: count * SHDR.size])
    place = at - f.library.get(0, SHOFF)
    first, second = (Binary(rows[place : place + SHDR.size]) for _ in range(2))
    size = first.get(0, SH_SIZE)
    first.set(0, SH_SIZE, 64)
    second.add(0, SH_ADDR, 64)
    second.add(0, SH_OFFSET, 64)
    second.set(0, SH_SIZE, size - 64)
    rows[place : place + SHDR.size] = first + second
    f.library.extend(bytes(-len(f.library) % 8))
    f.library.set(0, SHOFF, len(f.library))
    f.library.set(0, SHNUM, count + 1)
    if f.library.get(0, SHSTRNDX) > place // SHDR.size:
        f.library.add(0, SHSTRNDX, 1)
    f.library.extend(rows)


def a_last_piece_that_is_our_remark(f: Files) -> None:
    one, other = f.library.section(".text", -1), f.library.section(".negativa")
    f.library[one : one + SHDR.size] = f.library[other : other + SHDR.size]


def a_first_segment_that_is_missing(f: Files) -> None:
    """ld.so would begin to map at the address of the second."""
    f.both(f.original.segment(0, PT_NOTE), bytes(4))
    for kind in (PT_NOTE, PT_LOAD):
        tables = view(bytes(f.library))
        f.append_segments(number=[r[0] for r in tables.segments].index(kind))


def a_note_to_the_end(f: Files) -> None:
    """No byte behind its holes is zero."""
    load = f.library.segment(-4)
    start = f.note + f.library.get(f.note, (104, 4))
    end = f.library.get(load, OFFSET) + f.library.get(load, FILESZ)
    f.library[start:end] = b"/" * (end - start)


def a_dynamic_section_in_another_segment(f: Files) -> None:
    """ld.so writes to it, and to the words behind the old one."""
    segment, at = f.library.segment(0, PT_DYNAMIC), f.library.section(".dynamic")
    load = f.library.segment(-4)
    size, old = f.library.get(segment, FILESZ), f.library.get(segment, OFFSET)
    place = -(-f.library.get(load, FILESZ) // 8) * 8
    f.library.set(load, FILESZ, place + size)
    f.library.set(load, MEMSZ, place + size)
    offset, address = f.library.get(load, OFFSET) + place, f.library.get(load, VADDR) + place
    f.library[offset : offset + size] = f.library[old : old + size]
    for row, columns in ((segment, (OFFSET, VADDR)), (at, (SH_OFFSET, SH_ADDR))):
        f.library.set(row, columns[0], offset)
        f.library.set(row, columns[1], address)


def both_tags(tag: int, new: int, value: Callable[[Files], int] | int | None = None) -> Fault:
    """Another row in both dynamic sections."""

    def changed(f: Files) -> None:
        at, place = f.original.dynamic(tag), f.library.dynamic(tag)
        kept = f.original.get(at, (8, 8)) if value is None else value
        row = DYN.pack(new, kept(f) if callable(kept) else kept)
        f.both(at, row)
        f.library[place : place + DYN.size] = row

    return changed


def both_symbols(name: str, kind: int, place: Callable[[Files], int], shift: int = 0) -> Fault:
    """A dynamic symbol that names another thing in both, as if it were of this section."""

    def changed(f: Files) -> None:
        at = f.original.get(f.original.section(".dynsym"), SH_OFFSET)
        while f.original.get(at, SHNDX) == 0:
            at += SYM.size
        first, index = f.original.get(at, (0, 4)), f.original.names.index(name)
        f.both(at, SYM.pack(first, 16 | kind, 0, index, place(f) + shift, 8))

    return changed


def own_relocation(number: int, column: int) -> Fault:
    """A change of a row that has ld.so map the spare."""

    def changed(f: Files) -> None:
        table = f.library.place(f.library.value(7))
        count = f.library.value(0x6FFFFFF9)
        f.library.add(table + (count + number) * 24, (8 * column, 8), 8)

    return changed


def at_region(
    number: int, offset: int, new: bytes, *, is_both: bool = False, kind: str = "region"
) -> Fault:
    """Bytes of a region, or of an element in one."""

    def changed(f: Files) -> None:
        at = f.line(kind, number)[0] + offset
        if is_both:
            f.both(at, new)
        else:
            place = f.at(at)
            f.library[place : place + len(new)] = new

    return changed


def gone(f: Files) -> int:
    """Address of an element that leaves its header, or another one in its place."""
    return f.address(f.line("unused", 1)[0])


def left(f: Files) -> int:
    """Address of kept GPU code; in libraries without, of other code."""
    return f.address(f.line("unused", 1)[1]) + 4096 if f.declared else first_hole(f) - 8


def first_hole(f: Files) -> int:
    note = note_of(bytes(f.library))
    assert note is not None
    return note.holes[0][0]


def with_zeros(name: str | None, column: Column, value: int) -> Fault:
    """Add to a column of the segment of a section, or of the first before zeros."""

    def changed(f: Files) -> None:
        tables = view(bytes(f.library))
        address = f.library.get(f.library.section(name), SH_ADDR) if name else None
        number = next(
            i
            for i, r in enumerate(tables.segments)
            if r[0] == PT_LOAD
            and (r[6] >= r[5] + 4096 if address is None else r[3] <= address < r[3] + r[6])
        )
        f.library.add(tables.phoff + number * PHDR.size, column, value)

    return changed


def declared_twice(kind: str) -> Fault:
    return lambda f: declare(f"{kind} {f.line(kind)[0]} {f.line(kind)[1]}")(f)


def a_trailer_that_ends_early(f: Files) -> None:
    del f.spare[f.trailer + 8 :]


def no_segments_but_ours(f: Files) -> None:
    count = sum(row[0] == PT_LOAD for row in view(bytes(f.library)).segments)
    for _ in range(count - 4):
        f.library.set(f.library.segment(0), TYPE, 5)


def a_kept_row_that_ends_before_its_start(f: Files) -> None:
    start = f.spare.get(f.trailer + TRAILER.size + KEPT.size, (0, 8))
    f.spare.set(f.trailer + TRAILER.size + KEPT.size, (8, 8), start - 8)


def both_relocations(tag: int, place: Callable[[Files], int], shift: int = 0, *words: int) -> Fault:
    """The first words of a table in both."""

    def changed(f: Files) -> None:
        at = f.original.place(f.original.value(tag))
        f.both(at, struct.pack(f"<{1 + len(words)}Q", place(f) + shift, *words))

    return changed


def a_note_in_gpu_code(f: Files) -> None:
    at, address = f.line("unused", 1)[0], gone(f)
    now = f.library.segment(0, PT_NOTE)
    f.library.set(now, OFFSET, f.at(at))
    f.library.set(now, VADDR, address)
    f.both(f.original.segment(0, PT_NOTE), struct.pack("<IIQQ", PT_NOTE, 4, at, address))


def notes_where_code_was(f: Files) -> None:
    """Debuggers read them from the file."""
    f.library.set(f.library.section(".text"), SH_TYPE, 7)
    f.both(f.original.section(".text") + SH_TYPE[0], b"\7\0\0\0")


# fmt: off
FAULTS: list[tuple[str, str, Fault]] = [
    # The files.
    ("plain", "ranges overlap", declared_twice("unused")),
    ("plain", "regions overlap", declared_twice("region")),
    ("plain", "a line of what was declared is not known", declare("used 1 2")),
    ("plain", "a line of what was declared is not known", declare("region 2 1")),
    ("plain", "a line of what was declared is not known", declare("trimmed 1 2")),
    ("plain", "a line of what was declared is not known", declare("unused 1")),
    ("plain", "no spare belongs to it", longer("spare", 8)),
    ("plain", "is no ELF file", ends_at("library", 63)),
    ("plain", "program headers leave the file", header(PHOFF, 1 << 63)),
    ("plain", "section headers leave the file", header(SHOFF, 1 << 63)),
    ("cut", "its table of tag 0x5 is not in its file", row(5, 1 << 40)),
    ("plain", "the name of section 0 leaves the file", section(".shstrtab", SH_SIZE, 1 << 40)),
    ("plain", "the name of section", section(".text", SH_NAME, 1 << 20)),
    ("plain", "leaves the file", section(".shstrtab", SH_SIZE, -1)),
    ("cut", "leaves the file or the address space", a_last_page_far_away),
    ("plain", "leaves the file or the address space", segment(-1, FILESZ, 8)),
    ("plain", "leaves the file or the address space", segment(0, OFFSET, 1 << 40)),
    ("plain", "is not aligned to pages", segment(1, ALIGN, -4096)),
    ("large", "is not aligned to pages", segment(2, ALIGN, 2048)),
    ("plain", "of a 64-bit little-endian machine", both(4, b"\1")),
    ("plain", "of a 64-bit little-endian machine", both(PHENTSIZE[0], b"\0")),
    ("plain", "of a 64-bit little-endian machine", header(SHENTSIZE, 0)),
    ("plain", "its sections have no names", header(SHSTRNDX, 1 << 15)),
    ("plain", "has no dynamic section that is loaded", segment(0, TYPE, 2, PT_DYNAMIC)),
    ("plain", "has no dynamic section that is loaded", segment(0, VADDR, 1 << 40, PT_DYNAMIC)),
    ("cut", "its dynamic section has no end", a_dynamic_section_without_an_end),
    # Segments.
    ("plain", "of the original has", byte("library", 4096)),
    ("plain", "has other bounds", segment(-1, MEMSZ, 8)),
    ("plain", "has other bounds", with_zeros(".bss", FILESZ, 8)),
    ("large", "has other bounds", pieces_of_small_pages),
    ("plain", "has another protection", segment(0, FLAGS, 2)),
    ("plain", "has another protection", segment(1, FLAGS, -1)),
    ("symbols", "would be executable", with_zeros(None, FLAGS, 1)),
    ("pieces", "is not described as the original has it", hole(1, PROTECTION, 2)),
    ("pieces", "is not described as the original has it", hole(1, CONSTANTS, 2)),
    ("pieces", "is not described as the original has it", hole(1, IN_FILE, 4096)),
    ("pieces", "is not described as the original has it", a_hole_that_begins_within_a_page),
    ("pieces", "is not described as the original has it", hole(-1, END, 1 << 40)),
    ("pieces", "is not described as the original has it", hole(1, END, -8)),
    ("cut", "is not described as the original has it", another_hole(0, 0)),
    ("cut", "it has other addresses", another_hole(2, 4096)),
    ("pieces", "the spare has other bytes for the hole", a_page_of_the_spare_that_the_library_has),
    ("packed", "no header covers the hole", segment(-6, MEMSZ, -4096)),
    ("plain", "in no place", with_zeros(None, MEMSZ, -4096)),
    ("pieces", "in no place", hole(1, START, 4096)),
    ("pieces", "in both", hole(1, START, -4096)),
    ("plain", "it has other addresses", more_segments((1, 4, 0, 1 << 30, 0, 0, 4096, 4096))),
    ("plain", "can't be mapped at its offset", segment(1, OFFSET, 8)),
    ("cut", "can't be mapped at its offset", segment(-1, OFFSET, 8)),
    ("plain", "its program headers share a page", program_headers_on_a_loaded_page),
    ("plain", "is aligned to another size", segment(0, ALIGN, 4096)),
    ("plain", "of type 0x4 is another one", segment(0, ALIGN, 4, PT_NOTE)),
    ("plain", "of type 0x4 is another one", segment(0, OFFSET, 4, PT_NOTE)),
    ("plain", "it has more segments", more_segments((PT_NOTE, 4, 0, 0, 0, 0, 0, 4))),
    # Sections.
    ("plain", ".comment, is another one", section(".comment", SH_FLAGS, 1)),
    ("plain", ".comment, is another one", section(".comment", SH_NAME, 1)),
    ("plain", ".comment, has other bytes", section(".comment", SH_OFFSET, 1)),
    ("plain", ".comment, has other bytes", section(".comment", SH_OFFSET, 1 << 40)),
    ("cut", ".dynstr, has other bytes", section(".dynstr", SH_ADDR, 8)),
    ("cut", ".dynstr, is another one", section(".dynstr", SH_SIZE, 8)),
    ("cut", ".dynstr, has other bytes", section(".dynstr", SH_OFFSET, 8)),
    ("plain", ".text, has other bytes",
     section(".text", SH_OFFSET, 8)),
    ("plain", ".bss, has other bytes",
     section(".bss", SH_OFFSET, -(1 << 33))),
    ("plain", ".text, is another one", section(".text", SH_FLAGS, 1)),
    ("plain", ".text, is another one", section(".text", SH_NAME, 1)),
    ("plain", "it has fewer sections", all_of(header(SHNUM, 9), header(SHSTRNDX, 8))),
    ("pieces", ".text, is another one", section(".whole.text", SH_NAME, 6)),
    ("pieces", "is not the next piece", section(".text", SH_TYPE, 6)),
    ("pieces", "is not the next piece", section(".text", SH_NAME, 1)),
    ("pieces", "is not the next piece", section(".text", SH_FLAGS, 1)),
    ("pieces", "is not the next piece", section(".text", SH_OFFSET, 8)),
    ("pieces", "is not the next piece", section(".text", SH_ADDR, 1 << 30)),
    ("pieces", "is not the next piece", section(".text", SH_SIZE, -8)),
    ("pieces", "is not the next piece", a_last_piece_that_is_our_remark),
    ("pieces", "is not the next piece", section(".text", SH_SIZE, 8, -1)),
    # The note and the spare.
    ("cut", "its note is not loaded", row(0x6E656761, 1 << 40)),
    ("cut", "no holes, or more than it has room for", note((100, 4), 1 << 20)),
    ("cut", "no holes, or more than it has room for", a_note_without_holes),
    ("cut", "a folder of its note is not absolute", note_text(112, 0)),
    ("cut", "holes, digest and names do not agree", note((8, 4), 1)),
    ("cut", "holes, digest and names do not agree", note((12, 4), 1)),
    ("cut", "holes, digest and names do not agree", note((16, 1), 1)),
    ("cut", "holes, digest and names do not agree", note_text(108, 0)),
    ("cut", "holes, digest and names do not agree", note_text(112, -3)),
    ("cut", "a spare, which is not given", ends_at("spare", 0)),
    ("cut", "its spare is too short", a_trailer_that_ends_early),
    ("cut", "that of another library or is damaged", trailer((8, 4), 1)),
    ("cut", "that of another library or is damaged", trailer((16, 1), 1)),
    ("cut", "that of another library or is damaged", longer("spare", 24)),
    ("cut", "the rows of its spare are damaged", kept(1, 0, -4096)),
    ("cut", "the rows of its spare are damaged", a_kept_row_that_ends_before_its_start),
    ("cut", "the rows of its spare are damaged", kept(0, 1, 1 << 30)),
    ("cut", "the rows of its spare are damaged", kept(0, 2, 1 << 40)),
    ("cut", "do not give the original back", kept(0, 2, 1)),
    ("cut", "do not give the original back", byte("spare", 0)),
    ("cut", "it is not of this original", a_longer_original),
    ("cut", "it is not of this original", byte("original", -1)),
    ("cut", "it is not of this original", given("sha256", "0" * 64)),
    ("cut", "such libraries are not cut", both(18, b"\xb7")),
    ("cut", "a loader may take its spare for a library", byte("spare", 64)),
    ("pieces", "is not the next piece", a_piece_in_the_place_of_the_next),
    ("pieces", "is not the next piece", a_piece_in_two),
    ("plain", "differs in machine, entry or flags", a_header_that_is_not_loaded),
    ("plain", "differs in machine, entry or flags", byte("library", 48)),
    ("plain", "it begins at another address", a_first_segment_that_is_missing),
    ("cut", "has no end", a_note_to_the_end),
    # What ld.so reads.
    ("cut", "its dynamic section has other rows", row(12, 8)),
    ("cut", "its dynamic section has other rows", a_row_of_another_kind),
    ("cut", "its dynamic section has other rows", a_row_of_a_known_kind),
    ("cut", "a text of its note or strings has no end", row(10, -0x800)),
    ("cut", "its dynamic strings are others", flip(5, 3)),
    ("cut", "its relocations are others", both_tags(0x6FFFFFF9, 0x6FFFFFF9, 1000)),
    ("cut", "its relocations are others", row(8, 24)),
    ("cut", "its relocations are others", row(9, 8)),
    ("cut", "its relocations are others", flip(7)),
    ("cut", "its relocations are others", flip(7, -8, size=8)),
    ("cut", "its jump slots are others", flip(23)),
    ("cut", "a part of other relocations than before", row(23, -24)),
    ("cut", "its code is relocated", both_tags(0x1C, 22)),
    ("cut", "its code is relocated", both_tags(0x1C, 30, 4)),
    ("cut", "its relocations are others", own_relocation(0, 0)),
    ("cut", "its relocations are others", own_relocation(1, 1)),
    ("cut", "its relocations are others", own_relocation(1, 2)),
    ("cut", "its dynamic section is elsewhere", a_dynamic_section_in_another_segment),
    ("cut", "its dynamic section is elsewhere",
     all_of(segment(-2, FILESZ, 8), segment(-2, MEMSZ, 8))),
    ("cut", "its own segment at", segment(-4, FLAGS, 2)),
    ("cut", "its own segment at", segment(-1, MEMSZ, 8)),
    ("cut", "its own segment at", all_of(segment(-1, OFFSET, 8), segment(-1, VADDR, 8))),
    ("cut", "its own segments are damaged",
     all_of(segment(-3, FILESZ, -8), segment(-3, MEMSZ, -8))),
    ("cut", "its own segments are damaged", both_tags(6, 6, 1 << 40)),
    ("cut", "its own segments are damaged", more_segments()),
    ("cut", "its own segments are damaged", all_of(segment(-1, FILESZ, 8), segment(-1, MEMSZ, 8))),
    ("cut", "the parameters of the code", stub(8)),
    ("cut", "the parameters of the code", row(10, 8)),
    ("cut", "is not that of this release", stub(96)),
    ("plain", "relocations without addends", both_tags(27, 17)),
    ("plain", "no section has its dynamic symbols", symbols_without_a_section),
    ("cut", "exports an IFUNC", both_symbols(".text", GNU_IFUNC, left)),
    ("symbols", "a symbol at", both_symbols(".nv_fatbin", 1, gone)),
    ("symbols", "a symbol at", both_symbols(".nv_fatbin", 1, gone, -4)),
    ("symbols", "is not executable", both_symbols(".nv_fatbin", FUNC, left)),
    ("symbols", "names another place in the file", both_symbols(".rodata", 1, left)),
    ("plain", "a table at 0x", both_tags(12, 12, gone)),
    # GPU code.
    ("plain", "a declared region leaves the original",
     declare("region 1099511627776 1099511627800")),
    ("plain", "is another one", at_region(1, 0, b"\0", is_both=True)),
    ("plain", "is another one", a_region_that_ends_early),
    ("plain", "is another one", at_region(1, 0, b"\1")),
    ("plain", "is another one", at_region(1, 8, b"\xff" * 8)),
    ("plain", "leaves its region", at_region(1, 4, b"\x10\0\0\0", is_both=True, kind="unused")),
    ("plain", "leaves its region", at_region(1, 8, b"\xff" * 8, is_both=True, kind="unused")),
    ("plain", "the trimmed cubin at offset", a_trimmed_cubin_of_another_digest),
    ("cut", "such libraries are not cut", no_segments_but_ours),
    ("cut", "or the original has none", both(SHNUM[0], b"\0\0")),
    ("plain", "the target of a relocation at", both_relocations(7, gone)),
    ("plain", "the target of a relocation at", both_relocations(23, gone)),
    ("packed", "the target of a relocation at", both_relocations(36, first_hole, 0, 16)),
    ("packed", "the target of a relocation at", both_relocations(36, first_hole, -8, 3)),
    ("plain", "a segment at", a_note_in_gpu_code),
    ("cut", ".text at", notes_where_code_was),
    ("plain", "the driver no longer finds the kept element",
     at_region(1, 8, b"\x70", kind="unused")),
    ("plain", "the header of the removed element", at_region(14, 0, b"\1", kind="unused")),
    ("plain", "the header of the removed element", at_region(1, 2, b"\2", kind="unused")),
    ("plain", "has another end", a_region_that_is_shorter),
    ("plain", "no longer finds the kept element", two_elements_that_are_declared_as_one),
]
# fmt: on


@pytest.fixture(scope="module")
def cases(sound: list[Sound], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sound]:
    names = ("plain", "symbols", "gone", "cut", "pieces", "packed")
    large = compacted(tmp_path_factory.mktemp("large") / "build", "-Wl,-z,max-page-size=65536")
    return {**dict(zip(names, sound, strict=True)), "large": large}


@needs_stub
def test_each_check_finds_its_fault(cases: dict[str, Sound], tmp_path: Path) -> None:
    missed = []
    for name, words, fault in FAULTS:
        if name != "packed" or relocations_supported():
            files = Files.of(cases[name])
            fault(files)
            done = files.ask(tmp_path)
            if done.returncode not in (1, 2) or words not in done.stderr:
                missed.append((name, words, done))
    assert missed == []


def test_without_names_of_files_it_says_how_to_ask() -> None:
    done = subprocess.run([PROGRAM], input="", capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: certify ORIGINAL" in done.stderr) == (2, True)
