"""Compaction of NVIDIA's own libraries: what a process sees of them is what it saw before."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import size
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.records import CompactOptions, Smaller
from tests.support.compacting import plan_of, vaddr_of
from tests.support.slimmed import dropped

pytestmark = pytest.mark.real_libs

LIBRARIES = {
    "cufft": "nvidia/cu13/lib/libcufft.so.12",
    "cublasLt": "nvidia/cu13/lib/libcublasLt.so.13",
    "cublas": "nvidia/cu13/lib/libcublas.so.13",
    "curand": "nvidia/cu13/lib/libcurand.so.10",
    "nccl": "nvidia/nccl/lib/libnccl.so.2",
}

# argv: the library, the original, a file with ranges of addresses to compare, names of symbols.
# Reads the original's program headers, and compares memory with its bytes: of what the loader
# and initialisers change it tells which words, and where in the library they point.
# Words are those of the address space, wherever a range starts: of a pointer that is cut in two,
# the lower part is what the file has (the linker left the addend there) wherever the load address
# happens to have so many zeros at its end.
OBSERVER = r"""
import ctypes, hashlib, json, os, struct, sys
path, original, ranges_file, names_file = sys.argv[1:]
lib = ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_LOCAL)

class Info(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("name", ctypes.c_char_p),
                ("headers", ctypes.c_void_p), ("count", ctypes.c_uint16)]

listed = []
def visit(info, size, data):
    if info.contents.name == path.encode():
        listed.append((info.contents.base, info.contents.count))
    return 0
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
ctypes.CDLL(None).dl_iterate_phdr(kind(visit), None)
(base, count), = listed
dlsym = ctypes.CDLL(None).dlsym
dlsym.restype, dlsym.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_char_p]
symbols = {n: dlsym(lib._handle, n.encode()) for n in json.load(open(names_file))}
find = ctypes.CDLL("libgcc_s.so.1")._Unwind_Find_FDE
find.restype, find.argtypes = ctypes.c_uint64, [ctypes.c_uint64, ctypes.c_void_p]
bases = ctypes.create_string_buffer(64)
unwinding = {n: max(find(a, bases) - base, 0) for n, a in symbols.items() if base < a}
with open(original, "rb") as file:
    header = file.read(64)
    phoff, phnum = struct.unpack_from("<Q", header, 32)[0], struct.unpack_from("<H", header, 56)[0]
    file.seek(phoff)
    rows = list(struct.iter_unpack("<IIQQQQQQ", file.read(56 * phnum)))
loads = [row for row in rows if row[0] == 1]
image_end = max(row[3] + row[6] for row in loads)
memory, file = os.open("/proc/self/mem", os.O_RDONLY), os.open(original, os.O_RDONLY)
words, differing, compared = [], [], 0
for start, end in json.load(open(ranges_file)):
    for _, flags, offset, vaddr, _, size, _, _ in loads:
        first, last = max(start, vaddr), min(end, vaddr + size)
        for page in range(first & -4096, last, 4096):
            at, length = max(page, first), min(page + 4096, last) - max(page, first)
            now = os.pread(memory, length, base + at)
            was = os.pread(file, length, offset + at - vaddr)
            assert len(now) == len(was) == length
            compared += length
            if now == was:
                continue
            if not flags & 2:
                differing.append(at)
            for word in range(at & -8, at + length, 8):
                part = slice(max(word - at, 0), word + 8 - at)
                if now[part] != was[part]:
                    target = int.from_bytes(now[part], "little") - base
                    words.append((word, target if 0 <= target < image_end else "elsewhere"))
print(json.dumps({
    "headers": count, "differing": differing, "compared": compared,
    "words": len(words), "which": hashlib.sha256(repr(words).encode()).hexdigest(),
    "symbols": {n: a - base if a > base else 0 for n, a in symbols.items()},
    "unwinding": unwinding,
}))
sys.stdout.flush()
os._exit(0)
"""


def dynamic_symbols(path: Path) -> list[str]:
    done = subprocess.run(
        ["nm", "-D", "--defined-only", "--no-demangle", path],
        capture_output=True,
        text=True,
        check=True,
    )
    fields = (line.split() for line in done.stdout.splitlines())
    return sorted({f[2].split("@")[0] for f in fields if len(f) == 3 and f[1] not in "AbBiI"})


def kept_ranges(library_map: LibraryMap, plan: LibraryPlan) -> Iterator[tuple[int, int]]:
    """Address ranges that hold none of what may change; the ELF header is left out."""
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    holes = []
    for region in library_map.iter_regions():
        for element in region.elements:
            if (element.payload.start, element.payload.end) in unused:
                holes.append((region.span.start, region.span.start + 16))
                holes.append((element.header_offset, element.payload.end))
    holes += [
        (f.span.start, f.span.end)
        for f in library_map.iter_frames()
        if (f.span.start, f.span.end) in unused
    ]
    position = 64
    for start, end in sorted({(vaddr_of(library_map, s), e - s) for s, e in holes}):
        if position < start:
            yield position, start
        position = max(position, start + end)
    yield position, 1 << 62


def observe(path: Path, original: Path, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", OBSERVER, str(path), str(original)]
    done = subprocess.run(
        [*command, str(folder / "ranges.json"), str(folder / "names.json")],
        capture_output=True,
        text=True,
        # The copy lies elsewhere, where its search path leads nowhere.
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, neighbours(original)))},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def neighbours(library: Path) -> list[Path]:
    """Folders of libraries in the ``site-packages`` that a library lies in."""
    packages = next(p for p in library.parents if (p / "nvidia").is_dir())
    return [library.parent, *packages.glob("nvidia/*/lib")]


def map_of(path: Path) -> LibraryMap:
    library_map = read_library(path, Scope(headers_only=True))
    with ByteSource(path) as source:
        identity = msgspec.structs.replace(library_map.library, sha256=source.sha256())
    return msgspec.structs.replace(library_map, library=identity)


def compact(
    path: Path, target: Path, is_kept: Callable[[int], bool]
) -> tuple[Smaller, LibraryMap, LibraryPlan]:
    library_map = map_of(path)
    plan = plan_of(library_map, is_kept)
    result = compact_library(path, target, library_map, plan)
    return result, library_map, plan


def same_to_a_process(
    path: Path, target: Path, library_map: LibraryMap, plan: LibraryPlan, folder: Path
) -> dict[str, Any]:
    (folder / "ranges.json").write_text(json.dumps(list(kept_ranges(library_map, plan))))
    (folder / "names.json").write_text(json.dumps(dynamic_symbols(path)))
    was, now = observe(path, path, folder), observe(target, path, folder)
    assert was["differing"] == now["differing"] == []
    assert now["compared"] == was["compared"] > 1_000_000
    # Relocations and initialisers change the very same words, to the very same pointers.
    assert (now["words"], now["which"]) == (was["words"], was["which"])
    assert now["symbols"] == was["symbols"]
    assert now["unwinding"] == was["unwinding"]
    assert any(now["unwinding"].values())
    return now


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("every", [0, 97])
def test_same_to_a_process(name: str, every: int, real_libs: Path, tmp_path: Path) -> None:
    path = real_libs / LIBRARIES[name]
    target = tmp_path / path.name
    result, library_map, plan = compact(path, target, lambda i: bool(every) and i % every == 0)
    assert result.notes == ()
    now = same_to_a_process(path, target, library_map, plan, tmp_path)
    assert now["headers"] > len(result.holes)
    unused = sum(d.size for d in plan.decisions if not d.kept)
    if not every:
        # All but some pages at both ends of what is kept between.
        assert size(result.holes) > 0.99 * unused - 200_000
    target.unlink()


def test_a_pointer_to_elsewhere_is_noticed(real_libs: Path, tmp_path: Path) -> None:
    path = real_libs / LIBRARIES["curand"]
    target = tmp_path / path.name
    shutil.copy(path, target)
    with ByteSource(path) as source:
        sections = read_host_elf(source).sections
        relocations = next(s for s in sections if s.name == ".rela.dyn")
        tables = next(s for s in sections if s.name == ".data.rel.ro")
        rows = struct.iter_unpack("<QQq", source.read(relocations.offset, relocations.size))
        places = [
            (relocations.offset + 24 * number, where, kind, addend)
            for number, (where, kind, addend) in enumerate(rows)
            if tables.vaddr <= where < tables.vaddr + tables.size and kind == 8
        ]
    row, where, kind, addend = places[len(places) // 2]
    with target.open("r+b") as file:
        file.seek(row)
        file.write(struct.pack("<QQq", where, kind, addend + 1))
    (tmp_path / "ranges.json").write_text(json.dumps([[tables.vaddr, tables.vaddr + tables.size]]))
    (tmp_path / "names.json").write_text("[]")
    was, now = observe(path, path, tmp_path), observe(target, path, tmp_path)
    assert now["words"] == was["words"] >= len(places)
    assert now["which"] != was["which"]


def test_libtorch_cuda(torch_cuda: Path, tmp_path: Path) -> None:
    target = tmp_path / torch_cuda.name
    _result, library_map, plan = compact(torch_cuda, target, lambda i: i % 50 == 0)
    same_to_a_process(torch_cuda, target, library_map, plan, tmp_path)


def test_cuobjdump_lists_what_is_kept(real_libs: Path, cuobjdump: Path, tmp_path: Path) -> None:
    # Of one run of elements at the end of the section's last region, so that the section is whole.
    path = real_libs / LIBRARIES["curand"]
    library_map = map_of(path)
    numbers = list(library_map.iter_code())
    last = next(library_map.iter_regions()).elements
    target = tmp_path / path.name
    # All of the first region is kept, all else removed: what is left of the section begins there.
    plan = plan_of(library_map, lambda i: numbers[i] in last)
    compact_library(path, target, library_map, plan)

    def listed(library: Path) -> list[str]:
        done = subprocess.run(
            [cuobjdump, "-lelf", "-lptx", library], capture_output=True, text=True, check=False
        )
        return re.findall(r"sm_\w+", done.stdout)

    assert len(listed(path)) > len(listed(target)) > 0
    assert len(listed(target)) == len(last)


def test_deterministic_and_stripped_of_debug_information(real_libs: Path, tmp_path: Path) -> None:
    path = real_libs / LIBRARIES["nccl"]
    first = compact_library(path, tmp_path / "a.so")
    second = compact_library(path, tmp_path / "b.so", options=CompactOptions())
    assert first.sha256 == second.sha256
    assert ".debug_info" in dropped(path, tmp_path / "a.so")
    assert first.size_before - first.size_after > 25_000_000
