"""Which file and offset an address of this process belongs to, and what identifies a library."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.storage.system import ProcessMemory
from pytest_negativa.tracing.libraries import identify_library, split_deleted
from pytest_negativa.tracing.mappings import Mappings, parse_maps
from tests.support.compiling import compile_shared, needs_compiler


def test_maps_are_parsed() -> None:
    maps = parse_maps(
        b"7f0000000000-7f0000001000 r-xp 00002000 fd:01 123    /lib/a b\\012.so\n"
        b"7f0000001000-7f0000002000 rw-p 00000000 00:00 0 \n"
        b"7f0000002000-7f0000003000 r--p 00000000 fd:01 9 /x/site-packages/y.so (deleted)\n"
        b"7f0000003000-7f0000004000 r--p 00000000 fd:01 7 /lib/a\\101.so\n"
        b"7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                  [vdso]\n"
    )
    assert [(m.file.path, m.offset, m.executable) for m in maps] == [
        ("/lib/a b\n.so", 0x2000, True),
        ("/x/site-packages/y.so (deleted)", 0, False),
        ("/lib/a\\101.so", 0, False),
    ]
    assert [m.file.inode for m in maps] == [123, 9, 7]
    path, gone = split_deleted(maps[1].file)
    assert gone
    library = identify_library(path)
    assert library.path == "/x/site-packages/y.so" and library.size is None
    assert library.package_path == "y.so"


@needs_compiler
def test_an_address_in_a_library_is_a_file_offset(tmp_path: Path) -> None:
    mappings = Mappings()
    compiled = compile_shared("value.c", tmp_path / "libvalue.so", "-DVALUE=1", "-DSIZE=1")
    library = ctypes.CDLL(str(compiled))
    handle = library._handle
    link_map_address = ProcessMemory().read_exactly(handle, 8)
    assert link_map_address is not None
    base = int.from_bytes(link_map_address, "little")
    path = str(compiled.resolve())
    for _ in range(2):
        assert mappings.find(base + 0x10) == ((path, Path(path).stat().st_ino), 0x10)
    assert path in {file.path for file in mappings.new_libraries()}
    assert not mappings.new_libraries()
    assert mappings.find(id(mappings)) is None
    assert mappings.find(8) is None


def test_each_address_is_found_in_the_mappings_of_now(tmp_path: Path) -> None:
    mappings = Mappings()
    mappings.refresh()
    image = tmp_path / "image.cubin"
    image.write_bytes(bytes(3 * mmap.PAGESIZE))
    with image.open("rb") as file, open(os.memfd_create("heap"), "r+b") as memory:
        memory.truncate(mmap.PAGESIZE)
        size = 3 * mmap.PAGESIZE
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        heap = mmap.mmap(memory.fileno(), 0)
        holder = (ctypes.c_char * mmap.PAGESIZE).from_buffer(heap)
        lines = parse_maps(Path("/proc/self/maps").read_bytes())
        assert str(image) in {line.file.path for line in lines}
        for line in lines:
            for address in (line.start, (line.start + line.end) // 2, line.end - 1):
                found = mappings.find(address)
                if line.file.path.startswith("/memfd:"):
                    assert found is None
                else:
                    assert found == (line.file, line.offset + address - line.start)
        assert mappings.find(ctypes.addressof(holder)) is None
        mapped.close()
        assert all(mappings.find(m.start) is None for m in lines if m.file.path == str(image))
        del holder
        heap.close()


def test_build_ids_are_those_of_readelf() -> None:
    path = os.path.realpath(sys.executable)
    try:
        text = subprocess.run(["readelf", "-n", path], capture_output=True, text=True).stdout
    except OSError:
        pytest.skip("no readelf")
    expected = next((x.split()[-1] for x in text.splitlines() if "Build ID" in x), None)
    found = identify_library(path)
    assert found.build_id == expected
    assert found.size == os.path.getsize(path)


def test_a_file_that_is_no_library_has_no_build_id(tmp_path: Path) -> None:
    for data in (b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200):
        (tmp_path / "x").write_bytes(data)
        assert identify_library(str(tmp_path / "x")).build_id is None
