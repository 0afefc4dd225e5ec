"""A page's data as few bytes: columns as differences, texts by what they share, deflated.

Unpacked, the data is the length of a JSON header in 4 bytes (little-endian), the header, and the
numbers of all columns. A number is the difference from the one above it, in zigzag and LEB128, as
in Protocol Buffers ("sint64"). ``data.js`` reads it.
"""

from __future__ import annotations

import os.path
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pytest_negativa.models.page import (
    AlikeRow,
    CopyRow,
    ElementRow,
    HistoryRow,
    HostRow,
    KernelRow,
    LaunchRow,
    Page,
    TestRow,
)

_TABLES: dict[str, type[NamedTuple]] = {
    "elements": ElementRow,
    "kernels": KernelRow,
    "copies": CopyRow,
    "tests": TestRow,
    "launches": LaunchRow,
    "history": HistoryRow,
    "host": HostRow,
    "alike": AlikeRow,
}


def pack(page: Page) -> bytes:
    """The data of a page, deflated (RFC 1950)."""
    tables = {name: _columns(row, getattr(page, name)) for name, row in _TABLES.items()}
    shared = shared_lengths(page.texts)
    header = {
        "report": page.report,
        "part": page.part,
        "proof": page.proof,
        "hostProof": page.host_proof,
        "facts": page.facts,
        "nextCommand": page.next_command,
        "own": page.own,
        "unusedReasons": page.unused_reasons,
        "hostIncomplete": page.host_incomplete,
        "leftOutRanges": page.left_out_ranges,
        "alikeByModule": page.alike_by_module,
        "leftOutAlike": page.left_out_alike,
        "tables": {
            name: [[column, len(values)] for column, values in columns.items()]
            for name, columns in tables.items()
        },
        "texts": [
            text[shared:]
            for text, shared in zip(page.texts, shared_lengths(page.texts), strict=True)
        ],
    }
    encoded = msgspec.json.encode(header)
    numbers = bytearray()
    for columns in tables.values():
        for values in columns.values():
            _write_column(numbers, values)
    _write_column(numbers, shared)
    return zlib.compress(len(encoded).to_bytes(4, "little") + encoded + numbers, 9)


def _columns(row: type[NamedTuple], rows: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    columns = list(zip(*rows, strict=True)) or [()] * len(row._fields)
    return dict(zip(row._fields, columns, strict=True))


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
