"""A page's data as few bytes: columns as differences, texts by what they share, deflated.

Unpacked, the data is the length of a JSON header in 4 bytes (little-endian), the header, and the
numbers of all columns. A number is the difference from the one above it, in zigzag and LEB128, as
in Protocol Buffers ("sint64"). ``data.js`` reads it.
"""

from __future__ import annotations

import os.path
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

COLUMNS = {
    # An element or frame, by library and offset. Numbers of libraries are those of the report's
    # rows. A region is counted from 0 in its library, -1 for a frame; sizes are bytes in the file.
    # The name is its source file or largest kernel, demangled; else its region's.
    "elements": ("library", "section", "kind", "arch", "region", "start", "size", "reason",
                 "detail", "name"),
    # A kernel that the run's devices could load, by library and name. Mangled is -1 for an unused
    # one: all mangled names would double the page. The size is that of its largest code in an
    # unpacked cubin, 0 for PTX. First is the test that used it first, -1 if unused; element the
    # first one that holds it; line the first of its code in the file, 0 if unknown.
    "kernels": ("library", "name", "mangled", "size", "first", "element", "file", "line"),
    # A further element that holds a kernel.
    "copies": ("kernel", "element"),
    # A test, or a phase of the session in which something was used first. Milliseconds are those of
    # all its phases; launches and nanoseconds of GPU time those of all kernels, of no library, too.
    "tests": ("name", "outcome", "milliseconds", "launches", "nanoseconds"),
    # Launches of a kernel in a test and in NVTX ranges, the outermost first; GPU time is 0 if it is
    # unknown.
    "launches": ("kernel", "test", "times", "nanoseconds", "ranges"),
    # A saved run; the oldest is first.
    "history": ("run", "code_bytes", "unused_bytes"),
    # CPU code of a library whose pages were traced, in bytes.
    "host": ("path", "watched", "touched"),
}  # fmt: skip
"""The columns of each table. Texts are numbers of texts, -1 for none."""


class Page(NamedTuple):
    """Everything that the HTML report shows.

    Attributes:
        facts: by the names that ``main.js`` and ``pages.js`` read.
        tables: rows of ``COLUMNS``.
        texts: each text once.
    """

    facts: Mapping[str, Any]
    tables: Mapping[str, Sequence[tuple[int, ...]]]
    texts: tuple[str, ...]


def pack(page: Page) -> bytes:
    """The data of a page, deflated (RFC 1950)."""
    columns = {
        name: dict(
            zip(names, [*zip(*page.tables[name], strict=True)] or [()] * len(names), strict=True)
        )
        for name, names in COLUMNS.items()
    }
    shared = shared_lengths(page.texts)
    header = {
        **page.facts,
        "tables": {
            name: [[column, len(values)] for column, values in table.items()]
            for name, table in columns.items()
        },
        "texts": [text[length:] for text, length in zip(page.texts, shared, strict=True)],
    }
    encoded = msgspec.json.encode(header)
    numbers = bytearray()
    for table in columns.values():
        for values in table.values():
            _write_column(numbers, values)
    _write_column(numbers, shared)
    return zlib.compress(len(encoded).to_bytes(4, "little") + encoded + numbers, 9)


def shared_lengths(texts: Sequence[str]) -> tuple[int, ...]:
    """Length of the prefix that each text shares with the one before.

    ASCII alone is shared: JavaScript counts other characters otherwise.
    """
    prefixes = map(os.path.commonprefix, zip(("", *texts), texts, strict=False))
    return tuple(len(prefix) if prefix.isascii() else 0 for prefix in prefixes)


def _write_column(out: bytearray, values: Iterable[int]) -> None:
    before = 0
    for value in values:
        difference, before = value - before, value
        number = difference << 1 if difference >= 0 else (-difference << 1) - 1
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
