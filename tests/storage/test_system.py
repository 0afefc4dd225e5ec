"""Memory, mappings and identities of this very process; and who may hold CUPTI."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.storage.system import ProcessMemory, read_regular
from pytest_negativa.tracing.conflicts import busy_message, suspects
from pytest_negativa.tracing.cupti import _raise_later, _slots
from pytest_negativa.tracing.drivercalls import DRIVER_CALLS, Action
from pytest_negativa.tracing.mappings import (
    Mappings,
    identify_library,
    parse_maps,
    split_deleted,
)
from pytest_negativa.tracing.native import injection_library
from tests.support.libraries import PLAIN


@pytest.fixture(params=["process_vm_readv", "/proc/self/mem"])
def memory(request: pytest.FixtureRequest) -> ProcessMemory:
    memory = ProcessMemory()
    if request.param == "/proc/self/mem":
        memory._readv = None
    return memory


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


def test_maps_are_parsed() -> None:
    maps = parse_maps(
        b"7f0000000000-7f0000001000 r-xp 00002000 fd:01 123    /lib/a b\\012.so\n"
        b"7f0000001000-7f0000002000 rw-p 00000000 00:00 0 \n"
        b"7f0000002000-7f0000003000 r--p 00000000 fd:01 9 /x/site-packages/y.so (deleted)\n"
        b"7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                  [vdso]\n"
    )
    assert [(m.path, m.offset, m.executable) for m in maps] == [
        ("/lib/a b\n.so", 0x2000, True),
        ("/x/site-packages/y.so (deleted)", 0, False),
    ]
    assert [m.inode for m in maps] == [123, 9]
    path, gone = split_deleted(maps[1].file)
    assert gone
    library = identify_library(path)
    assert library.path == "/x/site-packages/y.so" and library.size is None
    assert library.package_path == "y.so"


def test_an_address_in_a_library_is_a_file_offset(memory: ProcessMemory) -> None:
    mappings = Mappings()
    library = ctypes.CDLL(str(PLAIN))
    handle = library._handle
    link_map_address = memory.read_exactly(handle, 8)
    assert link_map_address is not None
    base = int.from_bytes(link_map_address, "little")
    path = str((PLAIN).resolve())
    for _ in range(2):
        assert mappings.find(base + 0x10) == ((path, Path(path).stat().st_ino), 0x10)
    assert path in {file.path for file in mappings.new_libraries()}
    assert not mappings.new_libraries()
    assert mappings.find(id(mappings)) is None
    assert mappings.find(8) is None


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


def test_suspects() -> None:
    assert suspects(["/nsight/libToolsInjection64.so"], {}) == ("NVIDIA Nsight Systems (nsys)",)
    assert suspects(["/x/libtorch_cpu.so"], {})[0].startswith("torch.profiler")
    chained = {"NEGATIVA_CHAINED_INJECTION": "/t.so", "CUDA_INJECTION64_PATH": "/ours.so"}
    assert suspects([], chained) == ("the library in CUDA_INJECTION64_PATH (/t.so)",)
    ranges = {"NVTX_INJECTION64_PATH": str(injection_library())}
    assert "no other trace" in busy_message(None, [], ranges)
    assert '"CUPTI for nvtool"' in busy_message("CUPTI for nvtool", [], {})
    assert "not provided" not in busy_message("CUPTI for <not provided>", [], {})


def test_driver_calls_have_one_id_each() -> None:
    assert len({c.cbid for c in DRIVER_CALLS}) == len({c.name for c in DRIVER_CALLS}) == 25
    assert [c.cbid for c in DRIVER_CALLS] == sorted(c.cbid for c in DRIVER_CALLS)


def find_header(name: str) -> Path | None:
    places = [*sys.path, "/usr/local/cuda"]
    for place in places:
        for below in ("nvidia/cu13/include", "nvidia/cuda_cupti/include", "include"):
            if (Path(place) / below / name).is_file():
                return Path(place) / below / name
    return None


def test_driver_calls_agree_with_cupti_s_headers() -> None:
    """Ids and parameters, against the headers wherever CUPTI or CUDA is installed."""
    ids, parameters = find_header("cupti_driver_cbid.h"), find_header("generated_cuda_meta.h")
    if ids is None or parameters is None:
        pytest.skip("CUPTI's headers are not installed")
    id_text, parameter_text = ids.read_text(), parameters.read_text()
    subjects = {
        Action.KERNEL: ("name",),
        Action.DATA: ("name", "symbol"),
        Action.LOAD: ("image", "code", "fatCubin"),
        Action.LOAD_FILE: ("fname", "fileName"),
        Action.LINK_DATA: ("data",),
        Action.LINK_FILE: ("path",),
        Action.LINK_COMPLETE: ("cubinOut",),
    }
    for call in DRIVER_CALLS:
        words = [line.split() for line in id_text.splitlines() if f"_CBID_{call.name} " in line]
        assert [w[2].rstrip(",") for w in words] == [str(call.cbid)], call
        start = parameter_text.index(f"typedef struct {call.name}_params_st {{")
        body = parameter_text[start : parameter_text.index("}", start)].split("{")[1]
        members = [m.split()[-1].lstrip("*") for m in body.split(";") if m.strip()]
        assert _slots(call) <= len(members), call
        wanted = subjects.get(call.action)
        assert wanted is None or members[call.subject] in wanted, (call, members)


def test_what_a_signal_raised_in_a_callback_comes_later() -> None:
    with pytest.raises(KeyboardInterrupt, match="why"):
        _raise_later(KeyboardInterrupt("why"))
        for _ in range(1000):
            pass


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"data"
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link", follow=False)


def test_a_folder_is_not_left_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    descriptors = Path("/proc/self/fd").iterdir()
    # The one that lists them is closed by now.
    assert tmp_path not in [fd.readlink() for fd in descriptors if fd.is_symlink()]
