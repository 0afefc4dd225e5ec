"""Where tools that set uprobes look for a symbol in a file: st_value - sh_addr + sh_offset.

libbpf and others compute that. It shares nothing with the package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SYMBOL_TABLES = (2, 11)
_ALLOCATED, _THREAD_LOCAL, _RESERVED_INDEX = 0x2, 0x400, 0xFF00
_FUNCTIONS = (2, 10)


class Place(NamedTuple):
    """The file offset of a symbol by the formula, and that of its address by program headers."""

    offset: int
    size: int
    by_segments: int | None
    is_function: bool
    name: str


def places(data: bytes) -> Iterator[tuple[tuple[int, int], Place]]:
    """The places of all symbols of loaded sections, by type of the table and number."""
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phnum, _, shnum = struct.unpack_from("<HHH", data, 56)
    loads = [
        row
        for row in struct.iter_unpack("<IIQQQQQQ", data[phoff : phoff + 56 * phnum])
        if row[0] == 1 and row[5]
    ]
    rows = list(struct.iter_unpack("<IIQQQQIIQQ", data[shoff : shoff + 64 * shnum]))
    for _, kind, _, _, offset, size, link, *_ in rows:
        if kind not in _SYMBOL_TABLES:
            continue
        symbols = struct.iter_unpack("<IBBHQQ", data[offset : offset + size])
        for number, (at, info, _, index, value, length) in enumerate(symbols):
            if not 0 < index < _RESERVED_INDEX:
                continue
            _, _, flags, address, start, *_ = rows[index]
            if flags & (_ALLOCATED | _THREAD_LOCAL) != _ALLOCATED:
                continue
            # The end of a segment is a place, too: of _edata.
            mapped = [
                row[2] + value - row[3] for row in loads if row[3] <= value <= row[3] + row[5]
            ]
            name = rows[link][4] + at
            yield (
                (kind, number),
                Place(
                    offset=value - address + start,
                    size=length,
                    by_segments=mapped[-1] if mapped else None,
                    is_function=info & 15 in _FUNCTIONS,
                    name=data[name : data.index(b"\0", name)].decode(),
                ),
            )


def wrong_places(original: bytes, small: bytes) -> list[str]:
    """The symbols of a smaller file whose place is in that file, and of something else.

    The original's own places must be right.
    """
    before = dict(places(original))
    wrong = []
    for key, place in places(small):
        was = before[key]
        assert was.name == place.name
        if not 0 <= place.offset < len(small):
            continue
        same = not place.is_function or (
            small[place.offset : place.offset + place.size]
            == original[was.offset : was.offset + was.size]
        )
        if place.offset != place.by_segments or not same:
            wrong.append(f"{place.name}: {was.offset:#x} is now {place.offset:#x}")
    return wrong
