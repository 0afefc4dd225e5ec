"""Small files that promise, or unpack to, far more than they are: memory and time are bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import (
    CALLS,
    ELEMENT_HEADER,
    LINUX_64,
    LZ4,
    PAIR,
    PTX,
    ZSTD,
    Block,
    CubinSpec,
    ElementSpec,
    HostSection,
    build_cubin,
    build_element,
    build_frame,
    build_host,
    build_region,
    fatbin_section,
    pack,
    patched,
    zstd_frame,
)
from tests.support.emulators import not_in_qemu

MIB = 1 << 20
GIB = 1 << 30
IMAGE = build_cubin(CubinSpec(kernels={"kernel": bytes(64)})).data
SOUND = ElementSpec(content=IMAGE, flags=LINUX_64 | ZSTD)

# The high-water mark of this process alone: what getrusage tells includes the parent's.
READER = """
import json, sys, time
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

before = peak()
try:
    library_map = read_library(sys.argv[1], Scope())
    found = {
        "unreadable": [block.unreadable for block in library_map.iter_code()],
    }
except FormatError as e:
    found = {"error": str(e)}
json.dump({**found, "bytes": peak() - before, "seconds": time.process_time()}, sys.stdout)
"""


def read_apart(library: Path) -> dict[str, Any]:
    """What a process of its own finds, with the memory and the processor time that it takes."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(library)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def zeros_frame(size: int) -> bytes:
    """A sound frame of ``size`` zeros, 4 bytes for every 128 KB of them."""
    whole, rest = divmod(size, 128 << 10)
    blocks = [Block(1, b"\0", 128 << 10)] * whole
    return build_frame([*blocks, Block(1, b"\0", rest)], size)


def bomb(size: int) -> ElementSpec:
    return ElementSpec(content=b"", flags=ZSTD, payload=zeros_frame(size), unpacked_size=size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "reason", "limit"),
    [
        pytest.param(
            ElementSpec(
                content=IMAGE,
                flags=ZSTD,
                payload=build_frame([Block(0, IMAGE)], 400 * GIB),
                unpacked_size=400 * GIB,
            ),
            "more than the limit",
            8 * MIB,
            id="promise-and-frame-say-400-GiB",
        ),
        pytest.param(
            ElementSpec(
                content=IMAGE,
                flags=ZSTD,
                payload=build_frame([Block(0, IMAGE)], 400 * GIB),
            ),
            "zstd frame states 429,496,729,600 bytes",
            8 * MIB,
            id="frame-alone-says-400-GiB",
        ),
        pytest.param(
            ElementSpec(
                content=IMAGE,
                flags=ZSTD,
                payload=build_frame([Block(0, IMAGE)], 500 * MIB),
                unpacked_size=500 * MIB,
            ),
            "zstd|unpacks to",
            16 * MIB,
            id="lie-within-the-limit",
        ),
        pytest.param(bomb(500 * MIB), "not a cubin", 560 * MIB, id="true-within-the-limit"),
        pytest.param(
            ElementSpec(content=bytes(200 * MIB), flags=LZ4),
            "not a cubin",
            450 * MIB,
            id="lz4-true",
        ),
    ],
)
def test_bomb_in_an_element(tmp_path: Path, spec: ElementSpec, reason: str, limit: int) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([fatbin_section(build_region([spec, SOUND]))]).data)
    found = read_apart(library)
    unreadable, sound = found["unreadable"]
    assert sound is None
    assert any(part in unreadable for part in reason.split("|")), unreadable
    assert found["bytes"] < limit
    assert found["seconds"] < 10


@pytest.mark.slow
def test_many_bombs_do_not_spend_time_without_end(tmp_path: Path) -> None:
    # 300 elements of 16 KB each that unpack to 512 MB: 150 GB.
    element = build_element(bomb(512 * MIB))
    region = build_region([*[element] * 300, SOUND])
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([fatbin_section(region)]).data)
    found = read_apart(library)
    *bombs, sound = found["unreadable"]
    assert sound is None
    assert bombs[0].startswith("not a cubin")
    assert bombs[-1].endswith("taken for a decompression bomb")
    assert found["bytes"] < 600 * MIB
    assert found["seconds"] < 20


@pytest.mark.slow
@not_in_qemu("takes ten times the CPU time")
def test_bomb_in_a_frame(tmp_path: Path) -> None:
    size = 500 * MIB
    whole = (size - len(IMAGE)) // (128 << 10)
    blocks = [Block(0, IMAGE), *[Block(1, b"\0", 128 << 10)] * whole]
    frame = build_frame(blocks, len(IMAGE) + whole * (128 << 10))
    library = tmp_path / "lib.so"
    # Too many blocks for so small a section, unless something else is in it too.
    library.write_bytes(build_host([HostSection(name=".ldata", data=frame + bytes(MIB))]).data)
    found = read_apart(library)
    assert found["unreadable"] == [None]
    assert found["bytes"] < 600 * MIB
    assert found["seconds"] < 10


@not_in_qemu("keeps tables of all memory that was ever mapped")
def test_frames_that_state_a_huge_window(tmp_path: Path) -> None:
    # Each is looked into to see whether it holds a cubin; none may cost its window in memory.
    frame = build_frame([Block(0, b"text" * 16)], 511 * MIB) + bytes(400)
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([HostSection(name=".ldata", data=frame * 500)]).data)
    found = read_apart(library)
    assert found["unreadable"] == []
    assert found["bytes"] < 16 * MIB
    assert found["seconds"] < 10


def test_call_graph_bomb(tmp_path: Path) -> None:
    rows = PAIR.pack(0, CALLS) + PAIR.pack(2, 2) * 12_000_000
    image = build_cubin(CubinSpec(kernels={"kernel": bytes(8)}, call_graph=rows)).data
    spec = ElementSpec(content=image, flags=ZSTD, payload=zstd_frame(image, level=1))
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([fatbin_section(build_region([SOUND, spec, SOUND]))]).data)
    assert library.stat().st_size < MIB
    found = read_apart(library)
    assert found["unreadable"] == [
        None,
        "the library's tables have more than 8,388,608 rows",
        None,
    ]
    assert found["bytes"] < 250 * MIB


@pytest.mark.slow
def test_largest_call_graph_that_is_read(tmp_path: Path) -> None:
    rows = PAIR.pack(0, CALLS) + PAIR.pack(2, 2) * 8_000_000
    image = build_cubin(CubinSpec(kernels={"kernel": bytes(8)}, call_graph=rows)).data
    spec = ElementSpec(content=image, flags=ZSTD, payload=zstd_frame(image, level=1))
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([fatbin_section(build_region([spec]))]).data)
    found = read_apart(library)
    assert found["unreadable"] == [None]
    assert found["bytes"] < 900 * MIB


def iter_names(count: int, size: int) -> Iterator[bytes]:
    for number in range(count):
        yield b".entry %s%d()\n" % (b"n" * size, number)


@pytest.mark.slow
def test_names_bomb(tmp_path: Path) -> None:
    text = b".version 9.0\n.target sm_90\n" + b"".join(iter_names(12, 25_000_000))
    spec = ElementSpec(content=text, kind=PTX, flags=ZSTD, payload=pack(text, ZSTD))
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([fatbin_section(build_region([spec, SOUND]))]).data)
    assert library.stat().st_size < MIB
    found = read_apart(library)
    ptx, sound = found["unreadable"]
    assert ptx.startswith("the library's names take more than")
    assert sound is None
    assert found["bytes"] < 900 * MIB


@pytest.mark.parametrize("flags", [0, ZSTD])
def test_sparse_file(tmp_path: Path, flags: int) -> None:
    """An element of 4 GB that takes no room on the disk is not read into memory."""
    size = 4 * GIB - 8
    header = build_element(
        ElementSpec(
            content=b"",
            flags=flags,
            payload=b"",
            size=size,
            compressed_size=size if flags else 0,
            unpacked_size=MIB if flags else 0,
        )
    )
    assert len(header) == ELEMENT_HEADER.size
    region = build_region([header], size=len(header) + size)
    total = len(region) + size
    host = build_host([HostSection(name=".nv_fatbin", data=region, size=total)])
    end = host.offsets[0] + total
    table = int.from_bytes(host.data[0x28:0x30], "little")
    library = tmp_path / "lib.so"
    with library.open("wb") as file:
        file.write(patched(host.data[:table], 0x28, "Q", end + table))
        os.truncate(file.fileno(), end + table)
        file.seek(end + table)
        # Names come right behind the region's header, inside its hole: they aren't needed.
        file.write(host.data[table:])
    found = read_apart(library)
    assert len(found["unreadable"]) == 1
    assert "more than the limit of 536,870,912" in found["unreadable"][0]
    assert found["bytes"] < 16 * MIB
    assert found["seconds"] < 10
