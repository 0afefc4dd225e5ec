"""Logs of pages that came back, as ``pages/watch.c`` writes them."""

from __future__ import annotations

import array
import os
from collections.abc import Iterable

from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.pages.misses import Misses
from pytest_negativa.pages.page_logs import (
    _CHUNK,
    _FETCHED,
    _HOLES,
    _PROCESS,
    _RANGE,
    _RECORD,
    _SEEN,
)


def encode_misses(pid: int, found: Iterable[Misses]) -> bytes:
    """A log of pages that a process has, of libraries with a spare."""
    process = _RECORD.pack(_RECORD.size, _PROCESS, 0, 0, 0, 0, pid, 0, 0, 0, _RECORD.size)
    data = process + b"".join(map(_encode_holes, found))
    return data.ljust(-(-len(data) // _CHUNK) * _CHUNK, b"\0")


def _encode_holes(misses: Misses) -> bytes:
    ranges, name = misses.ranges(), os.fsencode(misses.name)
    text = _aligned(name + misses.original)
    bits = _aligned(((1 << len(misses.pages)) - 1).to_bytes(-(-len(misses.pages) // 8), "little"))
    words = array.array(
        "H",
        (
            miss.first % PAGE_SIZE | miss.fetched * _FETCHED | bool(miss.times) * _SEEN
            for miss in misses.pages.values()
        ),
    )
    offset = _RECORD.size + len(ranges) * _RANGE.size + len(text)
    body = text + bits + _aligned(words.tobytes())
    size = offset - len(text) + len(body)
    head = _RECORD.pack(
        size, _HOLES, 0, 0, 0, len(ranges), 0, misses.original_size, 0, len(name), offset
    )
    return head + b"".join(_RANGE.pack(*one) for one in ranges) + body


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
