"""Slim libraries with one thing wrong, and the bytes of sound ones that mean nothing.

What a byte means is decided here by the formats alone: by plain tables and pyelftools, without the
certificate and without the writer.
"""

from __future__ import annotations

import hashlib
import io
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

EHDR_SIZE = 64
PHDR, SHDR = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
DYN, RELA, SYM = struct.Struct("<qQ"), struct.Struct("<QQq"), struct.Struct("<IBBHQQ")
NOTE, HOLE, KEPT = struct.Struct("<8sII32s32sQQ6I"), struct.Struct("<QQQII"), struct.Struct("<QQQ")
TRAILER = struct.Struct("<8sII32s32sQ")
PT_LOAD, PT_DYNAMIC, DT_NOTE = 1, 2, 0x6E656761
NULL, NOBITS, DYNSYM = 0, 8, 11


@dataclass(frozen=True)
class Pair:
    """A slim library, and its spare if it has one."""

    library: bytes
    spare: bytes = b""


@dataclass(frozen=True)
class View:
    """The tables of a library."""

    data: bytes
    segments: list[tuple[int, ...]]
    sections: list[tuple[int, ...]]
    phoff: int
    shoff: int

    def offset(self, address: int) -> int:
        """File offset of an address that has bytes."""
        row = next(s for s in self.segments if s[0] == PT_LOAD and s[3] <= address < s[3] + s[5])
        return row[2] + address - row[3]

    def dynamic(self) -> dict[int, int]:
        row = next(s for s in self.segments if s[0] == PT_DYNAMIC)
        found: dict[int, int] = {}
        for tag, value in DYN.iter_unpack(self.data[row[2] : row[2] + row[5]]):
            if tag == 0:
                break
            found[tag] = value
        return found


def view(data: bytes) -> View:
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phnum = struct.unpack_from("<H", data, 56)[0]
    shnum = struct.unpack_from("<H", data, 60)[0]
    return View(
        data,
        [PHDR.unpack_from(data, phoff + i * PHDR.size) for i in range(phnum)],
        [SHDR.unpack_from(data, shoff + i * SHDR.size) for i in range(shnum)],
        phoff,
        shoff,
    )


@dataclass(frozen=True)
class NoteView:
    """The note of a cut library, and its place in the file."""

    at: int
    holes: list[tuple[int, ...]]
    head: tuple[int, ...]
    pair: bytes
    original: bytes


def note_of(data: bytes) -> NoteView | None:
    tables = view(data)
    address = tables.dynamic().get(DT_NOTE)
    if address is None:
        return None
    at = tables.offset(address)
    head = NOTE.unpack_from(data, at)
    rows = [HOLE.unpack_from(data, at + head[7] + i * HOLE.size) for i in range(head[8])]
    return NoteView(at, rows, (*head[:3], 0, 0, *head[5:]), head[3], head[4])


# ---- Bytes that mean nothing ----


def meaningless(pair: Pair, unused: list[tuple[int, int]], original: bytes) -> Iterator[range]:
    """Ranges of file offsets of the library that no reader of it uses.

    Args:
        pair: sound.
        unused: ranges of file offsets of the original with payloads that were declared as unused.
        original: the original.
    """
    data = pair.library
    tables = view(data)
    used = [(0, EHDR_SIZE)]
    used.append((tables.phoff, tables.phoff + len(tables.segments) * PHDR.size))
    used.append((tables.shoff, tables.shoff + len(tables.sections) * SHDR.size))
    used += [(s[2], s[2] + s[5]) for s in tables.segments if s[0] == PT_LOAD]
    used += [(s[4], s[4] + s[5]) for s in tables.sections if s[1] not in (NULL, NOBITS)]
    position = 0
    for start, end in sorted(used):
        if position < start:
            yield range(position, start)  # between and behind all that has a name
        position = max(position, end)
    yield range(position, len(data))
    for number, row in enumerate(tables.segments):
        at = tables.phoff + number * PHDR.size
        if row[0] == PT_LOAD:
            yield range(at + 24, at + 32)  # p_paddr
    yield from _sections(data, tables, len(view(original).sections))
    yield from _payloads(tables, original, unused)
    if (note := note_of(data)) is not None:
        yield from _note(data, tables, note, view(original))


def _sections(data: bytes, tables: View, count: int) -> Iterator[range]:
    names = [section.name for section in ELFFile(io.BytesIO(data)).iter_sections()]
    for number, row in enumerate(tables.sections):
        at = tables.shoff + number * SHDR.size
        if row[1] == NULL:
            yield range(at, at + 4)
            yield range(at + 8, at + SHDR.size)  # a row of no type names nothing
        if number >= count:  # pieces and our own: to find bytes by name, and nothing links to them
            yield range(at + 40, at + SHDR.size)
            if names[number] == ".negativa":
                yield range(at, at + SHDR.size)
                yield range(row[4], row[4] + row[5])  # a remark for our commands
            if names[number] == ".shstrtab":
                yield range(at + 16, at + 24)
        if number == struct.unpack_from("<H", data, 62)[0]:
            yield range(at + 8, at + 24)  # flags and address of the section names
            yield range(at + 40, at + SHDR.size)
            # Names of sections that are gone, and of our remark.
            ends = {
                row[4] + s[0]: row[4] + s[0] + len(names[i]) + 1
                for i, s in enumerate(tables.sections)
            }
            spoken = {
                at
                for start, end in ends.items()
                if names[[s[0] for s in tables.sections].index(start - row[4])]
                not in ("", ".negativa")
                for at in range(start, end)
            }
            yield from (range(i, i + 1) for i in range(row[4], row[4] + row[5]) if i not in spoken)
        if row[1] == NOBITS:
            yield range(at + 24, at + 32)  # an offset without bytes; far away or not, see symbols


def _payloads(tables: View, original: bytes, unused: list[tuple[int, int]]) -> Iterator[range]:
    loads = [s for s in view(original).segments if s[0] == PT_LOAD]
    for start, end in unused:
        for load in loads:
            for now in tables.segments:
                shift = load[3] - load[2]
                first = max(start + shift, now[3])
                last = min(end + shift, now[3] + now[5])
                if now[0] == PT_LOAD and load[2] <= start < load[2] + load[5] and first < last:
                    yield range(first - now[3] + now[2], last - now[3] + now[2])


def _note(data: bytes, tables: View, note: NoteView, before: View) -> Iterator[range]:
    """Padding between our tables, and words that are ours alone."""
    dynamic = tables.dynamic()
    old = before.dynamic()
    head = note.head
    folders, remedy = note.at + head[11], note.at + head[12]
    end = data.index(b"\0", remedy) + 1
    strings = tables.offset(dynamic[5])
    rows = tables.offset(dynamic[7])
    yield range(folders, remedy)
    yield range(remedy, end)
    yield range(end, strings)
    yield range(strings + old[10], strings + dynamic[10])  # the messages
    yield range(strings + dynamic[10], rows)
    after = tables.offset(dynamic[7] + dynamic[8] - 1) + 1
    if 23 in dynamic and dynamic[23] >= dynamic[7] + dynamic[8]:
        after = tables.offset(dynamic[23] + dynamic[2] - 1) + 1
        yield range(rows + dynamic[8], tables.offset(dynamic[23]))
    load = next(s for s in tables.segments if s[0] == PT_LOAD and s[2] <= note.at < s[2] + s[5])
    yield range(after, load[2] + load[5])
    section = next(s for s in tables.segments if s[0] == PT_DYNAMIC)
    yield range(section[2] + section[5], section[2] + section[5] + 16)  # what ld.so writes over
    # Columns of the segment of the dynamic section that ld.so doesn't read.
    at = tables.phoff + tables.segments.index(section) * PHDR.size
    yield range(at + 24, at + 32)
    yield range(at + 48, at + PHDR.size)


def gives_original_back(pair: Pair, original: bytes) -> bool:
    """Whether the rows of a spare put the original together; a page may begin or end with zeros."""
    end = -(-len(original) // 4096) * 4096
    count = TRAILER.unpack_from(pair.spare, end)[2]
    found, position = b"", 0
    for row in KEPT.iter_unpack(pair.spare[end + TRAILER.size :][: count * KEPT.size]):
        start, stop, place = row
        found += pair.spare[position:start] + pair.library[place : place + stop - start]
        position = stop
    return found + pair.spare[position : len(original)] == original


# ---- One thing wrong ----

Corruption = Callable[[random.Random, Pair], "Pair | None"]


def put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _other(chance: random.Random, value: int, limit: int) -> int:
    """Another value of a field."""
    steps = (1, -1, 8, -8, 4096, -4096, 24, 1 << 20, value + 1, chance.getrandbits(16) + 1)
    return (value + chance.choice(steps)) % limit


def a_byte(chance: random.Random, pair: Pair) -> Pair:
    at = chance.randrange(len(pair.library))
    return Pair(
        put(pair.library, at, bytes([pair.library[at] ^ chance.randrange(2, 256)])), pair.spare
    )


def a_segment(chance: random.Random, pair: Pair) -> Pair | None:
    """A column of a program header that ld.so reads, or two rows that change places."""
    tables = view(pair.library)
    number = chance.randrange(len(tables.segments))
    row = list(tables.segments[number])
    if row[0] not in (PT_LOAD, 4, 7, 0x6474E550, 0x6474E552):
        return None
    column = chance.choice((0, 2, 3, 5, 6, 1) if row[0] == PT_LOAD else (0, 2, 3, 5))
    if column == 2 and row[0] != PT_LOAD and not row[5]:
        return None  # the place of no bytes: thread-local variables that are zero
    # A compacted library may lack the permission to run what is no code, or have it.
    bits = (1, 2, 4) if pair.spare or column == 0 else (2, 4)
    if column < 2:
        row[column] ^= chance.choice(bits)
    else:
        row[column] = _other(chance, row[column], 1 << 64)
    return Pair(put(pair.library, tables.phoff + number * PHDR.size, PHDR.pack(*row)), pair.spare)


def a_dynamic_row(chance: random.Random, pair: Pair) -> Pair:
    tables = view(pair.library)
    segment = next(s for s in tables.segments if s[0] == PT_DYNAMIC)
    number = chance.randrange(len(tables.dynamic()))
    at = segment[2] + number * DYN.size
    tag, value = DYN.unpack_from(pair.library, at)
    if chance.random() < 0.3:
        tag = tag ^ chance.choice((1, 2, 4, 1 << 20))
    else:
        value = _other(chance, value, 1 << 64)
    return Pair(put(pair.library, at, DYN.pack(tag, value)), pair.spare)


def a_relocation(chance: random.Random, pair: Pair) -> Pair:
    dynamic = view(pair.library).dynamic()
    at = (
        view(pair.library).offset(dynamic[7])
        + chance.randrange(dynamic[8] // RELA.size) * RELA.size
    )
    row = list(RELA.unpack_from(pair.library, at))
    column = chance.randrange(3)
    row[column] = _other(chance, row[column], 1 << 62)
    return Pair(put(pair.library, at, RELA.pack(*row)), pair.spare)


def a_symbol(chance: random.Random, pair: Pair) -> Pair:
    table = next(s for s in view(pair.library).sections if s[1] == DYNSYM)
    at = table[4] + chance.randrange(1, table[5] // SYM.size) * SYM.size
    row = list(SYM.unpack_from(pair.library, at))
    column = chance.choice((0, 1, 3, 4, 4, 4, 5))
    row[column] = _other(chance, row[column], 1 << {0: 32, 1: 8, 3: 16}.get(column, 64))
    return Pair(put(pair.library, at, SYM.pack(*row)), pair.spare)


def a_section(chance: random.Random, pair: Pair) -> Pair | None:
    """Place, size, type or flags of a section that symbols name."""
    tables = view(pair.library)
    number = chance.randrange(1, len(tables.sections))
    row = list(tables.sections[number])
    if row[1] in (NULL, NOBITS) or not row[2] & 2 or not row[5]:
        return None
    column = chance.choice((0, 1, 2, 3, 4, 5))
    row[column] = _other(chance, row[column], 1 << (32 if column < 2 else 64))
    return Pair(put(pair.library, tables.shoff + number * SHDR.size, SHDR.pack(*row)), pair.spare)


def a_near_section(chance: random.Random, pair: Pair) -> Pair | None:
    """A section without bytes gets a place in the file, where its symbols name other code."""
    tables = view(pair.library)
    empty = [
        i for i, s in enumerate(tables.sections) if s[1] == NOBITS and s[5] and not s[2] & 0x400
    ]
    if not empty:
        return None
    number = chance.choice(empty)
    row = list(tables.sections[number])
    row[4] = chance.randrange(len(pair.library))
    return Pair(put(pair.library, tables.shoff + number * SHDR.size, SHDR.pack(*row)), pair.spare)


def a_hole(chance: random.Random, pair: Pair) -> Pair | None:
    """A hole that is moved, longer, shorter or of another protection; all digests agree again."""
    note = note_of(pair.library)
    if note is None:
        return None
    rows = [list(row) for row in note.holes]
    row = chance.choice(rows)
    column = chance.randrange(4)
    row[column] = (
        row[column] ^ chance.choice((1, 2, 4))
        if column == 3
        else row[column] + chance.choice((-4096, 4096))
    )
    if chance.random() < 0.5 and column < 2:
        row[2] += row[0] - next(h for h in note.holes if h[1] == row[1] or h[0] == row[0])[0]
    packed = b"".join(HOLE.pack(*row) for row in rows)
    digest = hashlib.sha256(note.original + packed).digest()
    library = put(pair.library, note.at + note.head[7], packed)
    library = put(library, note.at + 16, digest)
    library = library.replace(note.pair.hex()[:16].encode(), digest.hex()[:16].encode())
    spare = put(pair.spare, -(-note.head[5] // 4096) * 4096 + 16, digest)
    return Pair(library, spare)


def a_spare_row(chance: random.Random, pair: Pair) -> Pair | None:
    note = note_of(pair.library)
    if note is None:
        return None
    end = -(-note.head[5] // 4096) * 4096
    count = TRAILER.unpack_from(pair.spare, end)[2]
    if chance.random() < 0.2:
        at = chance.randrange(end, end + TRAILER.size)
        return Pair(
            pair.library, put(pair.spare, at, bytes([pair.spare[at] ^ chance.randrange(1, 256)]))
        )
    at = end + TRAILER.size + chance.randrange(count) * KEPT.size
    row = list(KEPT.unpack_from(pair.spare, at))
    column = chance.randrange(3)
    row[column] = _other(chance, row[column], 1 << 64)
    return Pair(pair.library, put(pair.spare, at, KEPT.pack(*row)))


def a_spare_byte(chance: random.Random, pair: Pair) -> Pair | None:
    """A byte of a page that a hole gets."""
    note = note_of(pair.library)
    if note is None:
        return None
    hole = chance.choice(note.holes)
    at = chance.randrange(hole[2], hole[2] + hole[1] - hole[0])
    return Pair(
        pair.library, put(pair.spare, at, bytes([pair.spare[at] ^ chance.randrange(1, 256)]))
    )


def a_short_file(chance: random.Random, pair: Pair) -> Pair:
    if pair.spare and chance.random() < 0.5:
        return Pair(pair.library, pair.spare[: -chance.randrange(1, 9000)])
    return Pair(pair.library[: -chance.randrange(1, 3000)], pair.spare)


CORRUPTIONS: tuple[Corruption, ...] = (
    a_byte, a_segment, a_dynamic_row, a_relocation, a_symbol, a_section, a_near_section, a_hole,
    a_spare_row, a_spare_byte, a_short_file,
)  # fmt: skip
