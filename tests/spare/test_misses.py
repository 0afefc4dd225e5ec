"""Logs of misses: what is no log is an error, whatever the bytes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from pytest_negativa.errors import FormatError
from pytest_negativa.spare.misses import Misses, read_misses


def log(size: int, counts: bytes, magic: bytes = b"NEGMISS\0", version: int = 1) -> bytes:
    head = struct.pack("<8sII32s32sQ256s", magic, version, 0, b"p" * 32, b"o" * 32, size, b"lib.so")
    return head.ljust(4096, b"\0") + counts


def test_ranges_of_pages(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(log(5 * 4096 - 1, bytes([1, 255, 0, 0, 3])))
    misses = read_misses(path)
    assert misses == Misses("lib.so", b"p" * 32, b"o" * 32, 5 * 4096 - 1, bytes([1, 255, 0, 0, 3]))
    assert misses.ranges() == [(0, 8192), (16384, 20480)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "less than the head"),
        (log(4096, b"\0", magic=bytes(8)), "is no log of misses"),
        (log(4096, b"\0", version=2), "is no log of misses"),
        (log(4096, b"\0\0"), "has 2 pages, but the original 4,096 bytes"),
        (log(1 << 60, b""), "has 0 pages"),
    ],
)
def test_what_is_no_log(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=problem):
        read_misses(path)


def test_a_pipe_or_link_in_the_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("log")
    (tmp_path / "log").write_bytes(log(4096, b"\1"))
    for name in ("pipe", "link", "missing"):
        with pytest.raises(FormatError, match="cannot be read"):
            read_misses(tmp_path / name)
