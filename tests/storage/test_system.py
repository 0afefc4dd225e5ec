"""The memory of this very process, and regular files."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from pytest_negativa.storage.system import ProcessMemory, read_regular


@pytest.fixture
def memory() -> ProcessMemory:
    return ProcessMemory()


def test_memory_is_read(memory: ProcessMemory) -> None:
    data = os.urandom(3 * 4096)
    buffer = ctypes.create_string_buffer(data, len(data))
    assert memory.read(ctypes.addressof(buffer), len(data)) == data
    assert memory.read_exactly(ctypes.addressof(buffer) + 5, 4096) == data[5:4101]


@pytest.mark.parametrize("address", [0, 8, -1, 1 << 47, (1 << 64) - 8, 1 << 70])
def test_bad_addresses_are_no_crash(memory: ProcessMemory, address: int) -> None:
    assert memory.read(address, 16) == b""
    assert memory.read_exactly(address, 16) is None
    assert memory.read_string(address) is None


def test_reading_stops_where_memory_ends(memory: ProcessMemory) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size, flags = 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    end = start + mmap.PAGESIZE
    assert libc.munmap(end, mmap.PAGESIZE) == 0
    ctypes.memmove(end - 4, b"abcd", 4)
    assert memory.read(end - 4, 64) == b"abcd"
    assert memory.read_exactly(end - 4, 64) is None
    assert memory.read_string(end - 4) is None
    ctypes.memmove(end - 4, b"abc\0", 4)
    assert memory.read_string(end - 4) == b"abc"
    libc.munmap(start, mmap.PAGESIZE)


def test_long_strings(memory: ProcessMemory) -> None:
    buffer = ctypes.create_string_buffer(b"n" * 9000)
    assert memory.read_string(ctypes.addressof(buffer)) == b"n" * 9000
    assert memory.read_string(ctypes.addressof(buffer), limit=100) is None


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"data"
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="a link, which is not followed"):
        read_regular(tmp_path / "link", follow=False)


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"x" * 100_000)
    assert read_regular(file, limit=100_000) == b"x" * 100_000
    with pytest.raises(OSError, match="larger than 99,999 bytes"):
        read_regular(file, limit=99_999)


def test_a_folder_is_not_left_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    descriptors = Path("/proc/self/fd").iterdir()
    # The one that lists them is closed by now.
    assert tmp_path not in [fd.readlink() for fd in descriptors if fd.is_symlink()]
