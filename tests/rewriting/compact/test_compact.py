"""Compaction of libraries that the system's linker made, each loaded and used afterwards."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.elf_tables import EM_AARCH64, EM_X86_64
from pytest_negativa.gpucode.fatbin import OVERWRITTEN_KIND
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import size as span_size
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.original_tables import page_size, read_tables
from pytest_negativa.rewriting.compact.records import CompactOptions, Smaller
from pytest_negativa.rewriting.layout import Edits, Fill, Patch
from tests.support.builders import ElementSpec, build_region
from tests.support.compacting import (
    PADDING,
    SHAPES,
    SOURCE,
    Image,
    assert_same_image,
    build,
    chain,
    content,
    gpu_code,
    image,
    kept_parts,
    loader_aligns,
    needs_compiler,
    plan_of,
    read,
    relocations_supported,
    run_loaded,
    vaddr_of,
)
from tests.support.libraries import IS_ROOT
from tests.support.slimmed import dropped, refusal

pytestmark = needs_compiler

# In each of the two sections: region 0 is dropped, of region 1 the second element stays, region 2
# goes with its neighbour, of region 3 the first stays, region 4 is dropped.
KEPT = {2, 6}
ELEMENTS = sum(map(len, SHAPES))


def is_kept(number: int) -> bool:
    return number % ELEMENTS in KEPT


def compact(
    path: Path,
    target: Path,
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    **options: object,
) -> Smaller:
    return compact_library(
        path,
        target,
        library_map,
        plan,
        edits,
        CompactOptions(**options),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("library"))


LAYOUTS = {
    "default": (),
    "separate-code": ("-Wl,-z,separate-code",),
    "noseparate-code": ("-Wl,-z,noseparate-code",),
    "2M-pages": ("-Wl,-z,max-page-size=0x200000", "-Wl,-z,noseparate-code"),
    "2M-pages-separate": ("-Wl,-z,max-page-size=0x200000", "-Wl,-z,separate-code"),
    "64K-pages": ("-Wl,-z,max-page-size=0x10000", "-Wl,-z,common-page-size=0x10000"),
    "no-relro": ("-Wl,-z,norelro",),
    "now": ("-Wl,-z,now", "-Wl,-z,relro"),
    "sysv-hash": ("-Wl,--hash-style=sysv",),
    "both-hashes": ("-Wl,--hash-style=both",),
    "relr": ("-Wl,-z,pack-relative-relocs",),
    "gold": ("-fuse-ld=gold",),
    "lld": ("-fuse-ld=lld",),
    "stripped": ("-s",),
    "debug": ("-g",),
    "static-runtime": ("-static-libgcc", "-static-libstdc++"),
    "soname-and-rpath": ("-Wl,-soname,libelse.so", "-Wl,-rpath,$ORIGIN"),
}


# Only whole pages go; those of a library for aarch64 are 64 KiB, unless it is linked for less.
LEFT_BY_PAGES = {4096: 60_000, 65536: 340_000}


@pytest.mark.parametrize(
    "layout",
    [
        layout if number % 4 == 0 else pytest.param(layout, marks=pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_every_layout_works_as_before(layout: str, tmp_path: Path) -> None:
    if layout == "relr" and not relocations_supported():
        pytest.skip("needs glibc 2.36")
    path = build(tmp_path / "build", *LAYOUTS[layout])
    library_map = read(path)
    assert len(tuple(library_map.iter_regions())) == 2 * len(SHAPES)
    plan = plan_of(library_map, is_kept)
    target = tmp_path / "small" / path.name
    target.parent.mkdir()
    result = compact(path, target, library_map, plan)
    assert result.notes == ()
    unused = sum(d.size for d in plan.decisions if not d.kept)
    with ByteSource(path) as source:
        left = LEFT_BY_PAGES[page_size(read_tables(source))]
    assert span_size(result.holes) > unused - left
    assert result.size_after == target.stat().st_size < result.size_before - unused + left
    before, after = image(path), image(target)
    assert len(after.loads) > len(result.holes)
    assert_same_image(before, after, library_map, plan)
    # Each of the kept elements is there, unchanged.
    for part in kept_parts(library_map, plan):
        size = part.span.size
        offset = part.span.start
        wanted = path.read_bytes()[offset : offset + size]
        assert after.at(vaddr_of(library_map, offset), size) == wanted
    was = run_loaded(path, before, tmp_path / "was")
    now = run_loaded(target, before, tmp_path / "now")
    assert now["anonymous executable"] == []
    for key in was.keys() - {"protections", "anonymous executable"}:
        assert now[key] == was[key], key
    assert now["catches 1"] == len("thrown in the library")
    assert now["count"] == 41 + 1
    # In memory as in the file, and nothing is writable or executable that was not.
    for dump in (tmp_path / "now").iterdir():
        vaddr, data = int(dump.name), dump.read_bytes()
        assert data == after.at(vaddr, len(data))
    for start, end, protection in now["protections"]:
        if protection[0] != "-":
            of_original = [p for s, e, p in was["protections"] if s <= start < e]
            assert of_original[0][:2] == protection[:2], (hex(start), hex(end))
            assert protection[2] == "-" or of_original[0][2] == "x"


ALIGNED = (
    SOURCE
    + """
#include <cstdint>
alignas(0x20000) static char aligned_data[0x20000] = { 1 };
extern "C" const void *get_aligned() { return aligned_data; }
"""
)


@pytest.mark.parametrize("layout", ["default", "noseparate-code", "gold", "lld"])
def test_data_aligned_to_more_than_a_page_stays_aligned(layout: str, tmp_path: Path) -> None:
    path = build(tmp_path / "build", *LAYOUTS[layout], source=ALIGNED)
    before = image(path)
    assert max(row[7] for row in before.loads) == 0x20000
    library_map = read(path)
    target = tmp_path / "small.so"
    plan = plan_of(library_map, is_kept)
    compact(path, target, library_map, plan)
    after = image(target)
    assert_same_image(before, after, library_map, plan)
    assert_mappable(target, after)
    assert max(row[7] for row in after.loads) == 0x20000
    if not loader_aligns():
        pytest.skip("needs glibc 2.35")
    code = "import ctypes, sys; get = ctypes.CDLL(sys.argv[1]).get_aligned\n"
    code += "get.restype = ctypes.c_uint64; print(get() % 0x20000)"
    # It would be by chance once in 32 times.
    for _ in range(3):
        found = subprocess.check_output([sys.executable, "-I", "-S", "-c", code, str(target)])
        assert int(found) == 0


def test_alignment_that_cannot_be_kept(tmp_path: Path) -> None:
    path = build(tmp_path / "build", "-Wl,-Ttext-segment=0x11000", source=ALIGNED)
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    result = refusal(path, tmp_path / "small.so", library_map, plan)
    assert "alignment of its load address, 0x20000, can't be kept" in result.reason
    assert not (tmp_path / "small.so").exists()


def test_regions_stay_sound_chains(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    target = tmp_path / "small.so"
    compact(library, target, library_map, plan)
    memory = image(target).memory
    regions = list(library_map.sections[0].regions)
    starts = [vaddr_of(library_map, r.span.start) for r in regions]
    # Dropped, with its header.
    for index in (0, 2, 4):
        size = regions[index].span.size
        assert memory[starts[index] : starts[index] + size] == bytes(size)
    # One filler in front, the kept one, and the end cut off.
    position = starts[1] + 16
    kept = regions[1].elements[1]
    kept_vaddr = vaddr_of(library_map, kept.header_offset)
    assert chain(memory, starts[1]) == [(position, OVERWRITTEN_KIND, 0), (kept_vaddr, 2, 91)]
    assert memory[position + 64 : kept_vaddr] == bytes(kept_vaddr - position - 64)
    assert memory[position + 28 : position + 64] == bytes(36)  # arch, flags and all else
    # All behind the first are cut off.
    assert chain(memory, starts[3]) == [(starts[3] + 16, 2, 90)]
    end = vaddr_of(library_map, regions[3].elements[0].payload.end)
    cut = regions[3].span.end - regions[3].elements[0].payload.end
    assert memory[end : end + cut] == bytes(cut)


def test_compacting_again_changes_nothing(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    target = tmp_path / "small.so"
    compact(library, target, library_map, plan_of(library_map, is_kept))
    before = target.read_bytes()
    result = refusal(target, target)
    assert "compacted or cut before" in result.reason
    assert target.read_bytes() == before


def test_same_input_same_bytes_and_mode(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    source = tmp_path / "source.so"
    shutil.copyfile(library, source)
    source.chmod(0o4750)
    stamp = library_map.library
    results = []
    for name in ("a.so", "b.so"):
        results.append(compact(source, tmp_path / name, library_map, plan))
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o750
    assert stamp == plan.library
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()
    digest = hashlib.sha256((tmp_path / "a.so").read_bytes()).hexdigest()
    assert {r.sha256 for r in results} == {digest}


def test_library_that_nobody_may_write(library: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source.so", tmp_path / "small.so"
    shutil.copyfile(library, source)
    library_map = read(source)
    plan = plan_of(library_map, is_kept)
    source.chmod(0o444)
    # Of a folder that anybody may reach: root's own may be closed to others.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        shutil.copy(source, folder / "source.so")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if IS_ROOT:
                    os.setuid(65534)
                compact_library(
                    folder / "source.so",
                    folder / "small.so",
                    library_map,
                    plan,
                    options=CompactOptions(),
                )
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert stat.S_IMODE((folder / "small.so").stat().st_mode) == 0o444
        compact(source, target, library_map, plan)
        assert (folder / "small.so").read_bytes() == target.read_bytes()


def test_in_place_leaves_who_has_it_open_alone(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    shutil.copy(library, path)
    before = path.read_bytes()
    library_map = read(path)
    with path.open("rb") as opened:
        compact(path, path, library_map, plan_of(library_map, is_kept))
        assert opened.read() == before
    assert path.stat().st_size < len(before)
    assert [p.name for p in tmp_path.iterdir()] == ["lib.so"]


def test_strip_only(tmp_path: Path) -> None:
    path = build(tmp_path / "build", "-g")
    library_map = read(path)
    everything = plan_of(library_map, lambda i: True)
    for arguments in ((), (library_map, everything)):
        target = tmp_path / "small.so"
        result = compact(path, target, *arguments, min_gain=0)
        assert {".debug_info", ".symtab"} <= dropped(path, target)
        assert result.holes == ()
        assert_same_image(image(path), image(target), library_map, everything)
        kept = sections_of(target)
        assert {".comment", ".shstrtab", ".dynsym", ".nv_fatbin", ".negativa"} <= set(kept)
        assert not [name for name in kept if name.startswith(".debug")]


def test_edits_are_applied_to_kept_code(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    element = library_map.sections[0].regions[1].elements[1]
    start, end = element.payload.start, element.payload.end
    edits = Edits.of(
        library.stat().st_size,
        [Fill(start + 8, start + 5000, 0xCC), Patch(end - 100, b"new"), Patch(start, b"\0" * 8)],
    )
    target = tmp_path / "small.so"
    compact(library, target, library_map, plan, edits)
    vaddr = vaddr_of(library_map, start)
    found = image(target).at(vaddr, end - start)
    wanted = bytearray(library.read_bytes()[start:end])
    wanted[:8] = bytes(8)
    wanted[8:5000] = b"\xcc" * 4992
    wanted[-100:-97] = b"new"
    assert found == bytes(wanted)


def test_what_does_not_go_together(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    target = tmp_path / "small.so"
    # Of the host's bytes: nothing is written.
    host = library_map.sections[0].span.start - 8
    edits = Edits.of(library.stat().st_size, [Patch(host, b"host")])
    result = refusal(library, target, library_map, plan, edits)
    assert "fails its check" in result.reason
    assert list(tmp_path.iterdir()) == []


def test_edits_of_removed_code_are_refused(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, lambda i: False)
    start = library_map.sections[0].regions[0].elements[0].payload.start
    edits = Edits.of(library.stat().st_size, [Fill(start + 9000, start + 9001, 1)])
    done = refusal(library, tmp_path / "x.so", library_map, plan, edits)
    assert "edits overlap" in done.reason
    assert list(tmp_path.iterdir()) == []


def test_larger_pages(library: Path, tmp_path: Path) -> None:
    path = build(tmp_path / "build", *LAYOUTS["64K-pages"])
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    small, large = tmp_path / "4k.so", tmp_path / "64k.so"
    fine = compact(path, small, library_map, plan)
    of_machine(path, EM_AARCH64)
    library_map = read(path)
    coarse = compact(path, large, library_map, plan_of(library_map, lambda i: False))
    of_machine(path, EM_X86_64)
    of_machine(large, EM_X86_64)
    assert span_size(coarse.holes) < span_size(fine.holes)
    assert span_size(coarse.holes) > 0
    before, after = image(path), image(large)
    assert_same_image(before, after, library_map, plan)
    for _, _, offset, vaddr, _, size, memory_size, align in after.loads:
        assert (vaddr - offset) % 65536 == 0
        assert align >= 65536
        if memory_size > size and vaddr + size < 0x10000 * 4:
            assert (vaddr + size) % 65536 == 0
    assert run_loaded(large, before, tmp_path / "dump")["catches 1"] == 21


@pytest.mark.parametrize("most", [9, 10, 12, 14])
def test_no_more_headers_than_wanted(library: Path, tmp_path: Path, most: int) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    before = image(library)
    target = tmp_path / "small.so"
    whole = compact(library, tmp_path / "whole.so", library_map, plan)
    limit = len(before.headers) + most - 9
    result = compact(library, target, library_map, plan, max_headers=limit, min_gain=-(1 << 20))
    after = image(target)
    assert len(after.headers) <= limit
    assert_same_image(before, after, library_map, plan)
    assert span_size(result.holes) <= span_size(whole.holes)
    assert bool(result.notes) == (span_size(result.holes) < span_size(whole.holes))
    assert all("more holes would need" in note for note in result.notes)
    # The largest holes stay.
    assert not result.holes or span_size(result.holes) / len(result.holes) >= (
        span_size(whole.holes) / len(whole.holes)
    )


def test_small_gain_is_left(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    result = refusal(
        library, tmp_path / "x.so", library_map, plan, options=CompactOptions(min_gain=1 << 30)
    )
    assert re.fullmatch(r"saves only \d+\.\d kB, the minimum is 1\.1 GB", result.reason)
    stripped = build(tmp_path / "build", "-s")
    result = refusal(stripped, tmp_path / "x.so")
    assert result.reason == "there is nothing to remove"
    assert [p.name for p in tmp_path.iterdir()] == ["build"]


# --- What the loader uses stays ------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-Wl,-z,nopack-relative-relocs", "-Wl,-z,pack-relative-relocs"])
def test_relocation_target_in_unused_code(flag: str, tmp_path: Path) -> None:
    if "nopack" not in flag and not relocations_supported():
        pytest.skip("needs glibc 2.36")
    blob = bytearray(gpu_code(2, padding=PADDING))
    # The last 8 bytes of the first region's payload become a pointer.
    end = blob.index(bytes(PADDING), 16)
    end -= end % 8
    first, rest = bytes(blob[: end - 8]), bytes(blob[end:])
    (tmp_path / "rest.bin").write_bytes(rest)
    path = build(tmp_path / "build", ldata=first, extra="")
    source = (tmp_path / "build" / "data.s").read_text()
    source = source.replace(
        '    .incbin "ldata.bin"\n',
        f'    .incbin "ldata.bin"\n    .quad ldata_start\n    .incbin "{tmp_path}/rest.bin"\n',
    )
    (tmp_path / "build" / "data.s").write_text(source)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", "-o", path.name, "host.cpp", "data.s", flag],
        cwd=path.parent,
        check=True,
    )
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    refused = refusal(path, tmp_path / "small.so", library_map, plan)
    assert "the target of a relocation at" in refused.reason


def test_dynamic_symbol_in_unused_code(tmp_path: Path) -> None:
    blob = gpu_code(1)
    path = build(
        tmp_path / "build",
        fatbin=blob,
        extra="    .globl exported_blob\n    .set exported_blob, fatbin_start + 4096\n"
        "    .type exported_blob, @object\n    .size exported_blob, 100\n",
    )
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    refused = refusal(path, tmp_path / "small.so", library_map, plan)
    assert "a symbol at" in refused.reason


def test_code_right_before_a_hole_stays_alone_executable(tmp_path: Path) -> None:
    # Old layout: code, constants and GPU code in one segment; here with code in the very page
    # before the first hole, and behind the last.
    path = build(
        tmp_path / "build",
        "-Wl,-z,noseparate-code",
        extra='    .section .nv_fatbin2, "ax", @progbits\n    .fill 9000, 1, 0x90\n',
    )
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    target = tmp_path / "small.so"
    compact(path, target, library_map, plan)
    before, after = image(path), image(target)
    assert_same_image(before, after, library_map, plan)
    for _, flags, _, _, _, size, memory_size, _ in after.loads:
        assert not (flags & 1 and memory_size > size)
    assert run_loaded(target, before, tmp_path / "dump")["anonymous executable"] == []


FUNCTION = """
    .balign 16
    .globl odd_function
    .type odd_function, @function
odd_function:
    .byte 0xb8, 77, 0, 0, 0, 0xc3
    .size odd_function, .-odd_function
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86-64")
@pytest.mark.parametrize(
    "section", [".section .odd", ".section .a_odd", ".section .nv_fatbin", ".section .rodata"]
)
def test_code_in_a_section_that_is_not_said_to_hold_any(section: str, tmp_path: Path) -> None:
    # The segment is executable, for code and constants share it.
    path = build(
        tmp_path / "build",
        "-Wl,-z,noseparate-code",
        extra=f'    {section}, "a", @progbits\n{FUNCTION}',
    )
    library_map = read(path)
    plan = plan_of(library_map, lambda i: i % ELEMENTS == 3)
    target = tmp_path / "small.so"
    result = compact(path, target, library_map, plan)
    assert span_size(result.holes) > 300_000
    assert_same_image(image(path), image(target), library_map, plan)
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).odd_function())"
    for library in (path, target):
        command = [sys.executable, "-I", "-S", "-c", code, str(library)]
        assert subprocess.check_output(command) == b"77\n"


def test_section_that_is_all_hole_takes_no_room(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    blob = build_region([ElementSpec(content=content(5 * 4096 - 80, 9))])
    assert len(blob) == 5 * 4096
    (folder / "relocatable.bin").write_bytes(blob)
    path = build(
        folder,
        extra='    .section __nv_relfatbin, "a", @progbits\n    .balign 4096\n'
        '    .incbin "relocatable.bin"\n',
    )
    library_map = read(path)
    section = next(s for s in library_map.sections if s.name == "__nv_relfatbin")
    plan = plan_of(library_map, lambda i: False)
    target = tmp_path / "small.so"
    compact(path, target, library_map, plan)
    after = image(target)
    assert_same_image(image(path), after, library_map, plan)
    assert after.at(section.vaddr, 5 * 4096) == bytes(5 * 4096)
    row = next(r for r in readelf("-SW", target).splitlines() if " __nv_relfatbin " in r)
    assert row.split("__nv_relfatbin")[1].split()[0] == "NOBITS"
    assert row.split("NOBITS")[1].split()[0] == f"{section.vaddr:016x}"
    assert read_library(target, Scope(headers_only=True)).problems == ()


# --- Whatever spans, the image stays -------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with many regions."""
    shapes = random.Random(5).choices([(4000,), (9000, 3000), (500,) * 3, (20_000,)], k=24)
    return build(
        tmp_path_factory.mktemp("many"),
        "-Wl,-z,noseparate-code",
        "-Wl,-z,max-page-size=0x10000",
        fatbin=gpu_code(3, shapes),
        ldata=gpu_code(4, shapes, padding=24),
    )


@given(
    kept=st.sets(st.integers(0, 80)),
    strip=st.booleans(),
    machine=st.sampled_from([EM_X86_64, EM_AARCH64]),
    max_headers=st.sampled_from([12, 20, 2000]),
)
def test_any_plan_keeps_the_image(
    many: Path,
    tmp_path: Path,
    kept: set[int],
    strip: bool,
    machine: int,
    max_headers: int,
) -> None:
    of_machine(many, machine)
    library_map, before = read(many), image(many)
    plan = plan_of(library_map, kept.__contains__)
    target = tmp_path / "small.so"
    compact(
        many,
        target,
        library_map,
        plan,
        strip=strip,
        max_headers=max_headers,
        min_gain=-(1 << 30),
    )
    after = image(target)
    assert_same_image(before, after, library_map, plan)
    assert_mappable(target, after)


def of_machine(path: Path, machine: int) -> None:
    """State another machine, whose kernels may have larger pages."""
    with path.open("r+b") as file:
        file.seek(18)
        file.write(machine.to_bytes(2, "little"))


def assert_mappable(path: Path, found: Image) -> None:
    """What ld.so asks of program headers, see _dl_map_object_from_fd in glibc."""
    size = path.stat().st_size
    end = 0
    for _, _, offset, vaddr, _, file_size, memory_size, align in found.loads:
        assert align % 4096 == 0
        assert (vaddr - offset) % align == 0
        assert offset + file_size <= size
        assert file_size <= memory_size
        assert vaddr >= end
        end = vaddr + memory_size
    phoff = int.from_bytes(path.read_bytes()[32:40], "little")
    for _, _, offset, vaddr, _, file_size, _, _ in found.loads:
        mapped = -(-(vaddr + file_size) // 4096) * 4096 - vaddr + offset
        assert phoff >= mapped


# --- Readers of ELF files ------------------------------------------------------------------


def readelf(option: str, path: Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    done = subprocess.run(["readelf", option, str(path)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout


def sections_of(path: Path) -> list[str]:
    rows = (line.partition("]")[2].split() for line in readelf("-SW", path).splitlines())
    return [row[0] for row in rows if row and row[0].startswith(".")]


def test_readelf_finds_nothing_odd(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    target = tmp_path / "small.so"
    compact(library, target, library_map, plan_of(library_map, is_kept))
    was, now = readelf("-aW", library), readelf("-aW", target)
    for part in ("Dynamic section at", "Symbol table '.dynsym'", "GNU_RELRO", "Build ID"):
        assert part in now
    assert readelf("-dW", library).splitlines()[2:] == readelf("-dW", target).splitlines()[2:]
    assert "Warning" not in now
    assert len(was) > 0


def test_gnu_strip_refuses(library: Path, tmp_path: Path) -> None:
    if shutil.which("strip") is None:
        pytest.skip("needs strip")
    library_map = read(library)
    target = tmp_path / "small.so"
    compact(library, target, library_map, plan_of(library_map, is_kept))
    before = target.read_bytes()
    done = subprocess.run(["strip", str(target)], capture_output=True, text=True)
    assert done.returncode != 0
    assert target.read_bytes() == before


# --- Errors --------------------------------------------------------------------------------


def test_another_file_is_refused(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    changed = tmp_path / "changed.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with pytest.raises(StaleLibraryError, match="changed since it was traced: sha256"):
        compact_library(changed, tmp_path / "x.so", library_map, plan)
    unknown = msgspec.structs.replace(library_map.library, sha256=None)
    with pytest.raises(StaleLibraryError, match="digest isn't known"):
        compact_library(
            library,
            tmp_path / "x.so",
            msgspec.structs.replace(library_map, library=unknown),
            msgspec.structs.replace(plan, library=unknown),
        )
    assert [p.name for p in tmp_path.iterdir()] == ["changed.so"]


def test_target_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    with pytest.raises(ReconstructError, match=r"none/x\.so: cannot be written"):
        compact_library(library, tmp_path / "none" / "x.so", library_map, plan)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ReconstructError, match="cannot be written"):
        compact_library(library, folder, library_map, plan)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_full_disk_leaves_nothing(library: Path, tmp_path: Path) -> None:
    import resource

    library_map = read(library)
    plan = plan_of(library_map, is_kept)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            try:
                compact_library(library, tmp_path / "x.so", library_map, plan)
            except ReconstructError as e:
                code = 0 if "cannot be written" in str(e) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert soft
    assert list(tmp_path.iterdir()) == []
