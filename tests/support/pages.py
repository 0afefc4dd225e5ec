"""The data of an HTML report, read a second time: the page's own script is another reader."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_page(path: Path) -> dict[str, Any]:
    """The data of a page; see ``unpacked``."""
    (data,) = re.findall(r'<script[^>]* id="data">([^<]*)</script>', path.read_text())
    return unpacked(base64.b64decode(data))


def unpacked(data: bytes) -> dict[str, Any]:
    """The header of packed data, with whole texts and columns by name."""
    data = zlib.decompress(data)
    size = int.from_bytes(data[:4], "little")
    header: dict[str, Any] = json.loads(data[4 : 4 + size])
    numbers = sint64s(data[4 + size :])
    for columns in header["tables"].values():
        columns[:] = [(name, column(numbers, rows)) for name, rows in columns]
    shared = column(numbers, len(header["texts"]))
    for row, length in enumerate(shared):
        header["texts"][row] = header["texts"][row - 1][:length] + header["texts"][row]
    assert next(numbers, None) is None
    return header


def sint64s(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield (value >> 1) ^ -(value & 1)
            value = shift = 0


def column(numbers: Iterator[int], rows: int) -> tuple[int, ...]:
    values = [0]
    for _ in range(rows):
        values.append(values[-1] + next(numbers))
    return tuple(values[1:])
