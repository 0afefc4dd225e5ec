"""What compaction leaves alone, and why: each layout that it doesn't know, one by one."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import NegativaError, StaleLibraryError
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.compact import PROGRAM, compact_library
from pytest_negativa.rewriting.compact.records import CompactOptions
from tests.support.builders import patched
from tests.support.compacting import (
    CXX,
    build,
    image,
    needs_compiler,
    plan_of,
    read,
)
from tests.support.libraries import BIN
from tests.support.slimmed import dropped, refusal

pytestmark = needs_compiler

ALWAYS = CompactOptions(min_gain=-(1 << 30))
PHDR = struct.Struct("<IIQQQQQQ")
TYPE, FLAGS, OFFSET, VADDR, PADDR, FILE_SIZE, MEMORY_SIZE, ALIGN = range(8)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("library")).read_bytes()


def header(data: bytes, kind: int, number: int = 0) -> int:
    """Offset of the number-th program header of a type."""
    offset = struct.unpack_from("<Q", data, 32)[0]
    count = struct.unpack_from("<H", data, 56)[0]
    found = [
        offset + 56 * i
        for i in range(count)
        if struct.unpack_from("<I", data, offset + 56 * i)[0] == kind
    ]
    return int(found[number])


def change(kind: int, number: int = 0, **fields: int) -> Callable[[bytes], bytes]:
    """Change fields of a program header; a value is added to what is there."""

    def changed(data: bytes) -> bytes:
        at = header(data, kind, number)
        row = list(PHDR.unpack_from(data, at))
        for name, value in fields.items():
            row[globals()[name]] += value
        return data[:at] + PHDR.pack(*row) + data[at + 56 :]

    return changed


def swap_first_two(data: bytes) -> bytes:
    first, second = header(data, 1, 0), header(data, 1, 1)
    a, b = data[first : first + 56], data[second : second + 56]
    data = data[:first] + b + data[first + 56 :]
    return data[:second] + a + data[second + 56 :]


def change_section(name: bytes, field: int, value: int) -> Callable[[bytes], bytes]:
    """Set a 64-bit field (its offset in the row) of a section header."""

    def changed(data: bytes) -> bytes:
        shoff = struct.unpack_from("<Q", data, 40)[0]
        count, names = struct.unpack_from("<HH", data, 60)
        strings = struct.unpack_from("<Q", data, shoff + 64 * names + 24)[0]
        for index in range(count):
            at = shoff + 64 * index
            start = strings + struct.unpack_from("<I", data, at)[0]
            if data[start : data.index(b"\0", start)] == name:
                return patched(data, at + field, "Q" if field not in (0, 40) else "I", value)
        raise AssertionError(name)

    return changed


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "32-bit": (lambda d: patched(d, 4, "B", 1), "ELF class 1"),
    "big endian": (lambda d: patched(d, 5, "B", 2), "data encoding 2"),
    "object file": (lambda d: patched(d, 16, "H", 1), "ELF type 1"),
    "fixed address": (lambda d: patched(d, 16, "H", 2), "ELF type 2"),
    "core": (lambda d: patched(d, 16, "H", 4), "ELF type 4"),
    "text": (lambda d: b"#!/bin/sh\n" * 100, "no library or program"),
    "empty": (lambda d: b"", "is empty"),
    "phentsize": (lambda d: patched(d, 54, "H", 64), "e_phentsize 64"),
    "shentsize": (lambda d: patched(d, 58, "H", 40), "e_shentsize 40"),
    "phnum": (lambda d: patched(d, 56, "H", 0xFFFF), "is it truncated"),
    "shnum": (lambda d: patched(d, 60, "H", 0xFEFF), "past the end of the file"),
    "shnum extended": (lambda d: patched(d, 60, "H", 0), "has no section headers"),
    "shstrndx": (lambda d: patched(d, 62, "H", 0xFFF0), "e_shstrndx 65520 do not fit"),
    "names": (lambda d: patched(d, 62, "H", 0), "the name of section 1 leaves the file"),
    "interpreter": (lambda d: patched(d, header(d, 4), "I", 3), "PT_INTERP"),
    "unknown segment": (
        lambda d: patched(d, header(d, 4), "I", 0x65A3DBE6),
        "unknown type 0x65a3dbe6",
    ),
    "no dynamic": (lambda d: patched(d, header(d, 2), "I", 0), "no PT_DYNAMIC"),
    "filesz": (change(1, 0, FILE_SIZE=1 << 20), "past the end of the file"),
    "beyond the file": (
        change(1, -1, FILE_SIZE=1 << 40, MEMORY_SIZE=1 << 40),
        "past the end of the file",
    ),
    "address": (change(1, -1, MEMORY_SIZE=(1 << 63) - 1), "leaves the address space"),
    "align 0": (change(1, 0, ALIGN=-4096), "p_align 0x0"),
    "align odd": (change(1, 0, ALIGN=8192), "p_align 0x3000"),
    "not congruent": (change(1, 1, VADDR=8), "not congruent"),
    "unsorted": (swap_first_two, "begins before the one at"),
    "overlapping": (change(1, 0, MEMORY_SIZE=1 << 30), "begins before the one at"),
    "shared bytes": (change(1, 1, OFFSET=-4096), "is in no PT_LOAD"),
    "dynamic elsewhere": (change(2, 0, OFFSET=8), "is in no PT_LOAD"),
    "section elsewhere": (change_section(b".rodata", 16, 0x999000), "section .rodata is in no"),
    "section too long": (change_section(b".comment", 32, 1 << 40), "section .comment leaves"),
    "section name": (change_section(b".comment", 0, 1 << 30), "leaves the file"),
    "section link": (change_section(b".dynsym", 40, 9999), "sh_link 9999"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_layouts_that_are_not_known(what: str, library: bytes, tmp_path: Path) -> None:
    damage, reason = DAMAGE[what]
    path = tmp_path / "library.so"
    path.write_bytes(damage(library))
    result = refusal(path, tmp_path / "small.so", options=ALWAYS)
    assert reason in result.reason
    assert [p.name for p in tmp_path.iterdir()] == ["library.so"]


@pytest.mark.parametrize("name", ["program_pie", "program_no_pie", "rdc_callee.o"])
def test_programs_and_object_files(name: str, tmp_path: Path) -> None:
    result = refusal(BIN / name, tmp_path / "small", options=ALWAYS)
    assert ("PT_INTERP" in result.reason) == (name == "program_pie")


def test_program_without_interpreter(tmp_path: Path) -> None:
    assert CXX is not None
    (tmp_path / "main.cpp").write_text("int main() { return 0; }")
    done = subprocess.run([CXX, "-static-pie", "-o", "program", "main.cpp"], cwd=tmp_path)
    if done.returncode:
        pytest.skip("needs a static C library")
    result = refusal(tmp_path / "program", tmp_path / "small", options=ALWAYS)
    assert "DF_1_PIE" in result.reason


def dynamic_entry(data: bytes, tag: int) -> int:
    """Offset of an entry of the dynamic section."""
    row = PHDR.unpack_from(data, header(data, 2))
    for at in range(row[OFFSET], row[OFFSET] + row[FILE_SIZE], 16):
        if struct.unpack_from("<q", data, at)[0] == tag:
            return at
    raise AssertionError(tag)


@pytest.mark.parametrize(
    ("tag", "new_tag", "value", "reason"),
    [
        (8, 8, 1 << 40, "is not in its file"),
        (7, 7, 1 << 40, "is not in its file"),
    ],
)
def test_relocations_that_are_elsewhere(
    tag: int, new_tag: int, value: int, reason: str, library: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(patched(library, dynamic_entry(library, tag), "qQ", new_tag, value))
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    result = refusal(path, tmp_path / "x.so", library_map, plan, options=ALWAYS)
    assert reason in result.reason


def test_without_dynamic_symbols_gpu_code_stays(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    # The sections of the loader's tables are there, as if they were any data.
    shoff = struct.unpack_from("<Q", library, 40)[0]
    data = library
    for at in range(shoff, shoff + 64 * struct.unpack_from("<H", library, 60)[0], 64):
        if struct.unpack_from("<I", data, at + 4)[0] in (4, 11, 0x6FFFFFF6, 0x6FFFFFFE, 0x6FFFFFFF):
            data = patched(data, at + 4, "I", 1)
    path.write_bytes(data)
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    result = refusal(path, tmp_path / "x.so", library_map, plan, options=ALWAYS)
    assert "no section has its dynamic symbols" in result.reason


def test_dynamic_symbols_that_are_elsewhere(library: bytes, tmp_path: Path) -> None:
    # The loader's table is another one than the section is.
    at = dynamic_entry(library, 6)
    address = struct.unpack_from("<Q", library, at + 8)[0]
    path = tmp_path / "library.so"
    path.write_bytes(patched(library, at + 8, "Q", address - 24))
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    result = refusal(path, tmp_path / "x.so", library_map, plan, options=ALWAYS)
    assert "no section has its dynamic symbols" in result.reason


def test_sections_that_others_name_stay(library: bytes, tmp_path: Path) -> None:
    # .rodata comes to name .symtab, as relocation sections do, and that names .strtab.
    shoff = struct.unpack_from("<Q", library, 40)[0]
    count = struct.unpack_from("<H", library, 60)[0]
    kinds = [struct.unpack_from("<I", library, shoff + 64 * i + 4)[0] for i in range(count)]
    path = tmp_path / "library.so"
    path.write_bytes(change_section(b".rodata", 40, kinds.index(2))(library))
    compact_library(path, tmp_path / "small.so", options=ALWAYS)
    assert {".symtab", ".strtab"}.isdisjoint(dropped(path, tmp_path / "small.so"))


@pytest.mark.parametrize("offset", [0, 1 << 40])
def test_segment_without_bytes_in_the_file(offset: int, tmp_path: Path) -> None:
    # A PT_LOAD of nothing but zeros, as some linkers make for .lbss. Its place may be where strip
    # cut the file off.
    path = build(tmp_path / "build", source=SOURCE_WITH_LARGE_BSS)
    data = path.read_bytes()
    rows = image(path).headers
    last = [row for row in rows if row[TYPE] == 1][-1]
    end = last[VADDR] + last[MEMORY_SIZE]
    at = header(data, 0x6474E551)
    vaddr = -(-end // 4096) * 4096
    row = PHDR.pack(1, 6, offset, vaddr, vaddr, 0, 8192, 4096)
    path.write_bytes(data[:at] + row + data[at + 56 :])
    library_map = read(path)
    target = tmp_path / "small.so"
    plan = plan_of(library_map, lambda i: False)
    compact_library(path, target, library_map, plan)
    assert image(target).loads[-1][VADDR : ALIGN + 1] == (vaddr, vaddr, 0, 8192, 4096)


@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 0x7F, 0xFF])),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_tables_are_no_crash(
    tables: tuple[Path, LibraryMap, LibraryPlan, tuple[int, ...]],
    changes: list[tuple[float, int]],
) -> None:
    path, library_map, plan, places = tables
    data = bytearray(path.read_bytes())
    for where, value in changes:
        data[places[int(where * len(places))]] = value
    damaged, target = path.parent / "damaged.so", path.parent / "small.so"
    damaged.write_bytes(data)
    # The map of the sound file: what a file that changes behind our back would be.
    digest = hashlib.sha256(data).hexdigest()
    library = msgspec.structs.replace(library_map.library, sha256=digest)
    with contextlib.suppress(NegativaError):
        compact_library(
            damaged,
            target,
            msgspec.structs.replace(library_map, library=library),
            msgspec.structs.replace(plan, library=library),
            options=ALWAYS,
        )


@pytest.fixture(scope="module")
def tables(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, LibraryMap, LibraryPlan, tuple[int, ...]]:
    """A library and the offsets of its tables: headers, dynamic section, section names."""
    path = build(tmp_path_factory.mktemp("tables"))
    data = path.read_bytes()
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phnum, _, shnum = struct.unpack_from("<HHH", data, 56)
    dynamic = PHDR.unpack_from(data, header(data, 2))
    places = [
        *range(64),
        *range(phoff, phoff + 56 * phnum),
        *range(dynamic[OFFSET], dynamic[OFFSET] + dynamic[FILE_SIZE]),
        *range(shoff, shoff + 64 * shnum),
    ]
    library_map = read(path)
    return path, library_map, plan_of(library_map, lambda i: i % 13 == 2), tuple(places)


SOURCE_WITH_LARGE_BSS = (
    'extern "C" const char fatbin_start[], ldata_start[];\n'
    "static char zeros[1 << 20];\n"
    'extern "C" char *get() { return zeros; }\n'
)


def test_original_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "build")
    target = tmp_path / "small" / "small.so"
    target.parent.mkdir()
    touching = tmp_path / "certify"
    touching.write_text(f'#!/bin/sh\ntouch "{path}"\nexec "{PROGRAM}" "$@"\n')
    touching.chmod(0o755)
    monkeypatch.setattr("pytest_negativa.rewriting.compact.compact.PROGRAM", touching)
    library_map = read(path)
    plan = plan_of(library_map, lambda i: False)
    with pytest.raises(StaleLibraryError, match="changed while it was read"):
        compact_library(path, target, library_map, plan)
    assert list(target.parent.iterdir()) == []
