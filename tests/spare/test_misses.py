"""Logs of misses: what is no log is an error, whatever the bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.spare.misses import Miss, read_logs, read_misses

FETCHED, BESIDE, LOST = 1 << 28, 1 << 29, 1 << 30


def log(
    size: int,
    words: Sequence[int] = (),
    magic: bytes = b"NEGMISS\0",
    version: int = 2,
    pair: bytes = b"p",
) -> bytes:
    head = struct.pack("<8sII32s32sQ256s", magic, version, 0, pair * 32, b"o" * 32, size, b"lib.so")
    return head.ljust(4096, b"\0") + struct.pack(f"<{len(words)}I", *words)


def test_ranges_of_pages(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(log(5 * 4096 - 1, [1 | LOST, 0xFF07 | 0xABC << 16 | FETCHED, 0, 0, BESIDE]))
    misses = read_misses(path)
    assert (misses.name, misses.original, misses.original_size) == ("lib.so", b"o" * 32, 20479)
    assert misses.pages == {
        0: Miss(1, 0, False, lost=True),
        1: Miss(0xFF07, 4096 + 0xABC, True),
        4: Miss(0, 16384, False),
    }
    assert misses.ranges() == ((0, 8192), (16384, 20480))


def test_logs_of_one_original_are_added_up(tmp_path: Path) -> None:
    """Those of other machines, and of other cuts of the same library."""
    (tmp_path / "a.misses").write_bytes(log(4 * 4096, [2, BESIDE, 0, 1]))
    (tmp_path / "b.misses").write_bytes(
        log(4 * 4096, [3 | 5 << 16 | LOST, 4 | FETCHED, 0, 0], pair=b"q")
    )
    (tmp_path / "other").write_bytes(b"")
    (misses,) = read_logs([tmp_path])
    assert misses.pages == {
        0: Miss(5, 0, False, lost=True), 1: Miss(4, 4096, True), 3: Miss(1, 3 * 4096, False)
    }  # fmt: skip
    assert read_logs([tmp_path / "b.misses", tmp_path / "a.misses"])[0].ranges() == misses.ranges()
    (tmp_path / "making.misses").write_bytes(bytes(5 * 4096))
    told: list[str] = []
    assert read_logs([tmp_path], told.append) == [misses]
    assert told == [
        f"{tmp_path}/making.misses: a process is making it, or was killed meanwhile; it is left out"
    ]
    with pytest.raises(StoreError, match="no such log"):
        read_logs([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "a process is making it"),
        (log(4096, [0], magic=bytes(8)), "a process is making it"),
        (log(4096, [0])[:100], "less than the head"),
        (log(4096, [0], magic=b"NEGMISS1"), "is no log of misses"),
        (log(4096, [0], version=1), "is no log of misses"),
        (log(4096, [0, 0]), "has 2 pages, but the original 4,096 bytes"),
        (log(4096, [0]) + b"\0", "has 1 pages"),
        (log(1 << 60), "has 0 pages"),
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
    (tmp_path / "log").write_bytes(log(4096, [1]))
    for name in ("pipe", "link", "missing"):
        with pytest.raises(FormatError, match="cannot be read"):
            read_misses(tmp_path / name)
