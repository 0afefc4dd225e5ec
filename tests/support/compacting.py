"""Shared libraries built by the system's compiler around GPU code of our own, for compaction.

Everything here that judges a result (the image a loader would make of a file, a process that
loads it) is written a second time and shares nothing with the package.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Element, LibraryMap, Scope
from pytest_negativa.models.plan import Decision, LibraryPlan
from tests.support.builders import ElementSpec, build_region
from tests.support.libraries import SHARED_OBJECTS

CXX = shutil.which("g++") or shutil.which("c++")
COMPACTABLE = tuple(path for path in SHARED_OBJECTS if path.stem != "libframes")
"""Fixtures; dynamic symbols of libframes name its GPU code, so it stays whole."""
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")

# Regions of one element each would do for size; these have the shapes that matter: one element,
# some, and one so small that no page of it is its own.
SHAPES = ((30_000,), (9_000, 20_000, 9_000, 40_000), (64,), (5_000,) * 6, (100_000,))
PADDING = 40


def content(size: int, seed: int) -> bytes:
    """Bytes that don't repeat, have no zeros, and look like no magic."""
    block = b"".join(hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(size // 32 + 1))
    return block[:size].translate(bytes([1, *range(1, 256)]))


def gpu_code(seed: int, shapes: Sequence[Sequence[int]] = SHAPES, padding: int = 0) -> bytes:
    """Regions one behind the other, with zeros between them."""
    regions = []
    for number, sizes in enumerate(shapes):
        specs = [
            ElementSpec(
                content=content(size - size % 8, seed * 1000 + number * 10 + i), arch=90 + i
            )
            for i, size in enumerate(sizes)
        ]
        regions.append(build_region(specs) + bytes(padding))
    return b"".join(regions)


SOURCE = r"""
#include <stdexcept>
#include <string>

extern "C" const char fatbin_start[], fatbin_end[];
extern "C" __attribute__((visibility("hidden"))) char ldata_start[];

struct Wrapper { int magic, version; const void *data; void *unused; };
__attribute__((section(".nvFatBinSegment"), used))
static Wrapper wrapper = { 0x466243b1, 1, fatbin_start, nullptr };

static int one() { return 1; }
static int two() { return 2; }
__attribute__((used)) static int (*const relro_table[])() = { one, two };
static thread_local int counter = 40;
static char large_bss[100000];
static std::string initialised = "by a constructor";

extern "C" int call(int i) { return relro_table[i & 1](); }
extern "C" int count() { return ++counter; }
extern "C" int bss_sum() { int s = 0; for (char c : large_bss) s += c; large_bss[5] = 1; return s; }
extern "C" const void *registered() { return wrapper.data; }
extern "C" char *large_data() { return ldata_start; }
extern "C" int constructed() { return initialised == "by a constructor"; }
__attribute__((noinline)) static void thrower(int i) {
    if (i) throw std::runtime_error("thrown in the library");
}
extern "C" int catches(int i) {
    try { thrower(i); } catch (const std::exception &e) { return std::string(e.what()).size(); }
    return 0;
}
"""

ASSEMBLY = r"""
    .section .nv_fatbin, "a", @progbits
    .balign 8
    .global fatbin_start
    .hidden fatbin_start
fatbin_start:
    .incbin "fatbin.bin"
    .hidden fatbin_end
    .global fatbin_end
fatbin_end:
    .section .ldata, "{ldata_flags}", @progbits
    .balign 32
    .global ldata_start
    .hidden ldata_start
ldata_start:
    .quad 0x1122334455667788
    .quad ldata_start
    .incbin "ldata.bin"
    .quad ldata_start
    .quad 0x8877665544332211
{extra}
    .section .note.GNU-stack, "", @progbits
"""
# Only x86-64 has large data: the assembler knows the flag for no other machine.
LDATA_FLAGS = "awl" if platform.machine() == "x86_64" else "aw"
# The linker's default for aarch64 is 64 KiB: whole pages of that size would need far larger code.
# test_page_sizes.py has such code.
LINK_FLAGS = (f"-Wl,-z,max-page-size={mmap.PAGESIZE}",) if platform.machine() == "aarch64" else ()


def build(
    folder: Path,
    *flags: str,
    name: str = "libsynthetic.so",
    fatbin: bytes | None = None,
    ldata: bytes | None = None,
    extra: str = "",
    source: str = SOURCE,
) -> Path:
    """Compile and link; ``extra`` is assembly."""
    assert CXX is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fatbin.bin").write_bytes(gpu_code(1) if fatbin is None else fatbin)
    (folder / "ldata.bin").write_bytes(gpu_code(2, padding=PADDING) if ldata is None else ldata)
    (folder / "host.cpp").write_text(source)
    assembly = ASSEMBLY.replace("{ldata_flags}", LDATA_FLAGS).replace("{extra}", extra)
    (folder / "data.s").write_text(assembly)
    command = [
        CXX,
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        name,
        "host.cpp",
        "data.s",
        *LINK_FLAGS,
        *flags,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(flags)}: {done.stderr.strip().splitlines()[-1]}")
    return folder / name


def read(path: Path) -> LibraryMap:
    library_map = read_library(path, Scope(headers_only=True))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    identity = msgspec.structs.replace(library_map.library, sha256=digest)
    return msgspec.structs.replace(library_map, library=identity)


def spans(library_map: LibraryMap) -> list[tuple[int, int]]:
    """Of all payloads and frames, by offset."""
    return sorted((e.payload.start, e.payload.end) for e in library_map.iter_code())


def plan_of(library_map: LibraryMap, is_kept: Callable[[int], bool]) -> LibraryPlan:
    """A plan that keeps elements and frames by their number in the file."""
    return LibraryPlan(
        library=library_map.library,
        devices=("9.0",),
        decisions=tuple(
            Decision(start, end, is_kept(i), "loaded" if is_kept(i) else "wrong-arch")
            for i, (start, end) in enumerate(spans(library_map))
        ),
        used_kernels=(),
        unused_kernels=(),
    )


@dataclass(frozen=True)
class Image:
    """What a loader makes of a file: bytes by address; and what the file's tables say."""

    memory: bytes
    loads: tuple[tuple[int, ...], ...]
    headers: tuple[tuple[int, ...], ...]

    def at(self, vaddr: int, size: int) -> bytes:
        return self.memory[vaddr : vaddr + size]


def image(path: Path) -> Image:
    data = path.read_bytes()
    phoff = struct.unpack_from("<Q", data, 32)[0]
    phnum = struct.unpack_from("<H", data, 56)[0]
    rows = tuple(struct.unpack_from("<IIQQQQQQ", data, phoff + 56 * i) for i in range(phnum))
    loads = tuple(row for row in rows if row[0] == 1)
    memory = bytearray(max(row[3] + row[6] for row in loads))
    for _, _, offset, vaddr, _, size, _, _ in loads:
        memory[vaddr : vaddr + size] = data[offset : offset + size]
    return Image(bytes(memory), loads, rows)


def vaddr_of(library_map: LibraryMap, offset: int) -> int:
    for section in library_map.sections:
        if section.span.start <= offset < section.span.end:
            return section.vaddr + offset - section.span.start
    raise AssertionError(f"{offset:#x} is in no section")


def unused_addresses(library_map: LibraryMap, plan: LibraryPlan) -> bytearray:
    """A byte for each address: 1 where an unused element or frame or its region's header lies."""
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    ends = [s.vaddr + s.span.size for s in library_map.sections]
    found = bytearray(max(ends, default=64))

    def mark(start: int, end: int) -> None:
        vaddr = vaddr_of(library_map, start)
        found[vaddr : vaddr + end - start] = b"\1" * (end - start)

    for region in library_map.iter_regions():
        for element in region.elements:
            if (element.payload.start, element.payload.end) in unused:
                mark(element.header_offset, element.payload.end)
                mark(region.span.start, region.span.start + 16)
    for frame in library_map.iter_frames():
        if (frame.span.start, frame.span.end) in unused:
            mark(frame.span.start, frame.span.end)
    return found


def assert_same_image(
    before: Image, after: Image, library_map: LibraryMap, plan: LibraryPlan
) -> None:
    """Each byte at its address, but for the ELF header's offsets and what is unused."""
    assert len(before.memory) == len(after.memory)
    unused = unused_addresses(library_map, plan)
    unused[0x20:0x40] = b"\1" * 0x20
    unused += bytes(len(before.memory) - len(unused))
    different = [
        i
        for start in range(0, len(before.memory), 4096)
        if before.at(start, 4096) != after.at(start, 4096)
        for i in range(start, min(start + 4096, len(before.memory)))
        if before.memory[i] != after.memory[i] and not unused[i]
    ]
    assert not different, [hex(i) for i in different[:5]]


def kept_parts(library_map: LibraryMap, plan: LibraryPlan) -> list[Element]:
    kept = {(d.start, d.end) for d in plan.decisions if d.kept}
    return [e for e in library_map.iter_code() if (e.payload.start, e.payload.end) in kept]


def chain(memory: bytes, vaddr: int) -> list[tuple[int, int, int]]:
    """Walk a region in memory: address, kind and arch of each element."""
    magic, version, header_size, size = struct.unpack_from("<IHHQ", memory, vaddr)
    assert (magic, version, header_size) == (0xBA55ED50, 1, 16)
    end = vaddr + 16 + size
    position = vaddr + 16
    found = []
    while position < end:
        kind, element_version, element_header, payload = struct.unpack_from(
            "<HHIQ", memory, position
        )
        assert element_version == 0x0101
        arch = struct.unpack_from("<I", memory, position + 28)[0]
        found.append((position, kind, arch))
        position += element_header + payload
    assert position == end
    return found


LOADER = r"""
import ctypes, json, os, re, struct, sys
path, dump = sys.argv[1:3]
lib = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
facts = {}
for name, *arguments in (("call", 0), ("call", 1), ("count",), ("count",), ("bss_sum",),
                         ("bss_sum",), ("constructed",), ("catches", 0), ("catches", 1)):
    facts[" ".join(map(str, (name, *arguments)))] = getattr(lib, name)(*arguments)
maps = open("/proc/self/maps").read().splitlines()
own = [l for l in maps if l.endswith(path)]
base = min(int(l.split("-")[0], 16) for l in own)
names = sys.argv[3].split(",")
facts["symbols"] = {
    n: ctypes.cast(getattr(lib, n), ctypes.c_void_p).value - base for n in names
}
lib.registered.restype = lib.large_data.restype = ctypes.c_void_p
facts["registered"] = lib.registered() - base
facts["large"] = lib.large_data() - base
facts["anonymous executable"] = [
    l for l in maps if re.match(r"\S+ ..x. \S+ 00:00 0\s*$", l)
]
end = base
rows = []
for load in json.loads(sys.argv[4]):
    vaddr, size = load
    with open("/proc/self/mem", "rb", 0) as mem, open(f"{dump}/{vaddr}", "wb") as out:
        mem.seek(base + vaddr)
        out.write(mem.read(size))
facts["protections"] = [
    (int(l.split("-")[0], 16) - base, int(l.split("-")[1].split()[0], 16) - base, l.split()[1])
    for l in maps if base <= int(l.split("-")[0], 16) < base + json.loads(sys.argv[5])
]
print(json.dumps(facts))
sys.stdout.flush()
os._exit(0)
"""

EXPORTED = "call,count,bss_sum,registered,large_data,constructed,catches"


def run_loaded(path: Path, before: Image, dump: Path, names: str = EXPORTED) -> dict[str, Any]:
    """Load a library in a process of its own, use it, and dump its read-only segments.

    The dumps are named by address; ``before`` is the original's image.
    """
    dump.mkdir()
    # Neither written by relocations nor by the program.
    ranges = [(row[3], row[5]) for row in before.loads if not row[1] & 2]
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c", LOADER, str(path), str(dump), names),
            *(json.dumps(ranges), json.dumps(len(before.memory))),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def relocations_supported() -> bool:
    """Whether glibc applies DT_RELR: from 2.36 on."""
    return _glibc() >= (2, 36)


def loader_aligns() -> bool:
    """Whether glibc aligns the load address to more than a page: from 2.35 on."""
    return _glibc() >= (2, 35)


def _glibc() -> tuple[int, ...]:
    version = os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0.0"
    return tuple(map(int, version.split()[1].split(".")))
