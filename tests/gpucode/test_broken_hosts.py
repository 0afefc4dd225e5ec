"""Files that are no library, or a damaged one: one ``FormatError`` with file and offset."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.scan import Problems, iter_containers
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Scope
from tests.support.builders import (
    SHT_DYNAMIC,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_STRTAB,
    SHT_SYMTAB,
    CubinSpec,
    ElementSpec,
    HostSection,
    build_cubin,
    build_host,
    build_region,
    fatbin_section,
    patched,
)
from tests.support.invariants import check_map
from tests.support.libraries import BIN

IMAGE = build_cubin(CubinSpec(kernels={"kernel": bytes(64)})).data
REGION = build_region([ElementSpec(content=IMAGE)])
SOUND = build_host([fatbin_section(REGION)])

SHT_HASH = 5


@pytest.mark.parametrize(
    ("data", "offset", "problem"),
    [
        pytest.param(b"", None, "is empty, expected an ELF file", id="empty"),
        pytest.param(
            b"\x7f", None, "is no library or program (ELF), no other file with", id="one-byte"
        ),
        pytest.param(b"\x7fELF", 0, "truncated ELF header: 4 bytes", id="magic"),
        pytest.param(SOUND.data[:63], 0, "truncated ELF header: 63 bytes", id="63-bytes"),
        pytest.param(SOUND.data[:64], None, "section headers end at", id="header-alone"),
        pytest.param(b"#!/bin/sh\n" * 10, None, "is no library or program", id="script"),
        pytest.param(b"MZ" + bytes(64), None, "is a program or DLL of Windows", id="dll"),
        pytest.param(b"hsqs" + bytes(64), None, "is a SquashFS image, which", id="squashfs"),
        pytest.param(
            b"!<arch>\nlib.o/ 0 0 0 100644 4 `\nabcd" + bytes(64),
            None,
            "is a static archive; expected a library",
            id="archive",
        ),
        pytest.param(build_host([], elf_class=1).data, 4, "ELF class 1, expected 2", id="32-bit"),
        pytest.param(
            build_host([], encoding=2).data, 5, "ELF data encoding 2, expected 1", id="big-endian"
        ),
        pytest.param(IMAGE, 18, "is a bare cubin", id="cubin"),
        pytest.param(REGION, None, "is a bare fatbin", id="fatbin"),
        pytest.param(
            build_host([], table_offset=0, count=0, names_index=0).data,
            0x28,
            "has no section headers",
            id="no-section-headers",
        ),
        pytest.param(
            build_host([], table_entry_size=40).data, 0x3A, "e_shentsize 40", id="entry-size"
        ),
        pytest.param(build_host([], count=50).data, None, "past the end of the file", id="count"),
        pytest.param(build_host([], count=0xFFFF).data, 0x3C, "e_shnum 65535", id="count-max"),
        pytest.param(
            build_host([], names_index=9).data, 0x3C, "e_shstrndx 9 do not fit", id="names-index"
        ),
        pytest.param(
            build_host([], table_offset=2**64 - 1).data,
            2**64 - 1,
            "section headers end at",
            id="table-at-2-to-64",
        ),
        pytest.param(
            build_host([HostSection(name=".nv_fatbin", data=b"x", size=1 << 20)]).data,
            64,
            "section .nv_fatbin ends at 0x100040, past the end of the file",
            id="section-size",
        ),
        pytest.param(
            build_host([HostSection(name=".x", data=b"x", size=2**64 - 1)]).data,
            64,
            "section .x ends at",
            id="section-size-overflow",
        ),
        pytest.param(
            build_host([HostSection(name=".x", data=b"x", offset=2**64 - 1, size=2)]).data,
            2**64 - 1,
            "section .x ends at",
            id="section-offset-overflow",
        ),
        pytest.param(
            build_host(
                [
                    HostSection(name=".nv_fatbin", data=REGION),
                    HostSection(name=".rodata", offset=72, size=100),
                ]
            ).data,
            72,
            "section .rodata overlaps section .nv_fatbin",
            id="overlap",
        ),
        pytest.param(
            build_host([HostSection(name=".a"), HostSection(name=".b")], section_names=b"").data,
            None,
            "",
            id="no-names",
        ),
        pytest.param(
            build_host([HostSection(name=".a", kind=SHT_SYMTAB, data=bytes(24), link=1)]).data,
            None,
            "",
            id="symbol-table-linked-to-itself",
        ),
        pytest.param(
            build_host([HostSection(name=".a", kind=SHT_DYNAMIC, data=bytes(16), link=99)]).data,
            None,
            "damaged ELF file",
            id="link-to-nowhere",
        ),
    ],
)
def test_file_that_is_no_sound_library(
    tmp_path: Path, data: bytes, offset: int | None, problem: str
) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(data)
    try:
        library_map = read_library(library, Scope())
    except FormatError as e:
        assert problem in e.problem
        assert e.path == str(library)
        assert offset is None or e.offset == offset
        assert str(e).startswith(f"{library}:")
    else:
        # Section names that lead nowhere do no harm where there is no GPU code, nor do symbols.
        assert not problem
        check_map(library_map)


def test_sections_without_bytes_or_unloaded_ones_are_passed_over(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    beyond = HostSection(name=".bss", kind=SHT_NOBITS, size=1 << 40)
    unloaded = HostSection(name=".comment", flags=0, data=REGION)
    empty = HostSection(name=".empty", offset=70)
    host = build_host([beyond, unloaded, empty, fatbin_section(REGION)])
    library.write_bytes(host.data)
    library_map = read_library(library, Scope())
    assert [s.name for s in library_map.sections] == [".nv_fatbin"]
    assert library_map.sections[0].regions[0].span.start == host.offsets[-1]


@pytest.mark.parametrize("name", ["libmultiarch.so", "libframes.so", "program_no_pie"])
def test_library_cut_anywhere(tmp_path: Path, name: str) -> None:
    # The section headers come last, so no cut leaves a sound file.
    data = (BIN / name).read_bytes()
    library = tmp_path / "lib.so"
    for cut in (*range(0, len(data), 97), 4, 63, 64, len(data) - 1):
        library.write_bytes(data[:cut])
        with pytest.raises(FormatError) as caught:
            read_library(library, Scope())
        assert caught.value.path == str(library)
        assert cut < 64 or "section headers end at" in caught.value.problem


def test_elf_header_of_a_real_library_with_any_byte_changed(tmp_path: Path) -> None:
    data = (BIN / "libempty_region.so").read_bytes()
    library = tmp_path / "lib.so"
    for offset in range(64):
        for value in (0, 0x7F, 0xFF, data[offset] ^ 1):
            library.write_bytes(patched(data, offset, "B", value))
            try:
                check_map(read_library(library, Scope()))
            except FormatError as e:
                assert e.path == str(library)


@pytest.mark.slow
def test_section_header_of_a_real_library_with_any_field_changed(tmp_path: Path) -> None:
    data = (BIN / "libempty_region.so").read_bytes()
    table = int.from_bytes(data[0x28:0x30], "little")
    count = int.from_bytes(data[0x3C:0x3E], "little")
    library = tmp_path / "lib.so"
    fields = ((0, "I"), (4, "I"), (8, "Q"), (24, "Q"), (32, "Q"), (40, "I"), (56, "Q"))
    outcomes = set()
    for number in range(count):
        for offset, layout in fields:
            for value in (0, 1, 7, 0x7FFFFFFF, 0xFFFFFFFF):
                library.write_bytes(patched(data, table + 64 * number + offset, layout, value))
                try:
                    check_map(read_library(library, Scope()))
                    outcomes.add("map")
                except FormatError:
                    outcomes.add("error")
    assert outcomes == {"map", "error"}


# --- What ends in time, and within memory ------------------------------------------------


def test_a_hash_table_is_not_read(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    sections = [
        HostSection(name=".h", kind=SHT_HASH, link=2, data=b"\xff\xff\xff\x7f" + bytes(12_000)),
        HostSection(name=".t", kind=SHT_SYMTAB, link=3, entry_size=24, data=bytes(24)),
        HostSection(name=".s", kind=SHT_STRTAB, data=b"\0"),
    ]
    library.write_bytes(build_host(sections).data)
    assert read_library(library, Scope()).sections == ()


@pytest.mark.slow
def test_tables_that_take_for_ever_are_given_up(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    sections = [HostSection(name=".n", kind=SHT_NOTE, offset=64, size=60_000, flags=0)] * 400
    library.write_bytes(build_host([*sections, HostSection(name=".d", data=bytes(60_000))]).data)
    with pytest.raises(FormatError, match="take too much reading") as caught:
        read_library(library, Scope())
    assert str(caught.value).count(str(library)) == 1


def test_one_long_name_for_many_sections(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    names = b"A" * 3_000_000 + b"\0"
    sections = [HostSection(name=".x", name_offset=0) for _ in range(1000)]
    library.write_bytes(build_host(sections, section_names=names).data)
    with pytest.raises(FormatError, match="take too much reading"):
        read_library(library, Scope())


def test_many_sections_over_the_same_bytes(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    data = HostSection(name=".d", data=bytes(1 << 20))
    again = [HostSection(name=".d", offset=64, size=1 << 20) for _ in range(3000)]
    library.write_bytes(build_host([data, *again]).data)
    with pytest.raises(FormatError, match="overlaps"):
        read_library(library, Scope())


def test_object_file_of_very_many_sections(tmp_path: Path) -> None:
    library = tmp_path / "lib.o"
    sections = [HostSection(name=f".text._ZN9namespace{i}Ev", alignment=1) for i in range(20_000)]
    library.write_bytes(build_host([*sections, fatbin_section(REGION)]).data)
    assert len(list(read_library(library, Scope()).iter_regions())) == 1


# --- What a path may lead to --------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"is a directory, expected a regular file"):
        read_library(tmp_path, Scope())


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"lib\.so: cannot be opened: No such file"):
        read_library(tmp_path / "lib.so", Scope())


def test_symlink_is_followed(tmp_path: Path) -> None:
    (tmp_path / "lib.so.1").write_bytes(SOUND.data)
    (tmp_path / "lib.so").symlink_to("lib.so.1")
    identity = read_library(tmp_path / "lib.so", Scope()).library
    assert identity.path == str((tmp_path / "lib.so.1").resolve())


def test_device() -> None:
    with pytest.raises(FormatError, match="is a character device, expected a regular file"):
        read_library("/dev/zero", Scope())


def test_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a relative name: the address of a socket is at most 107 bytes.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("lib.so")
        with pytest.raises(FormatError, match=r"cannot be opened|is a socket"):
            read_library("lib.so", Scope())


def run_reader(path: Path, *, as_nobody: bool = False) -> str:
    """What reading ``path`` raises in a process of its own."""
    drop = "os.setgroups([]); os.setgid(65534); os.setuid(65534);" if as_nobody else ""
    script = (
        "import os, sys\n"
        "from pytest_negativa.errors import FormatError\n"
        "from pytest_negativa.gpucode.library import read_library\n"
        "from pytest_negativa.models.library import Scope\n"
        f"{drop}\n"
        "try:\n"
        "    read_library(sys.argv[1], Scope())\n"
        "except FormatError as e:\n"
        "    sys.stdout.write(str(e))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lib.so")
    assert "is a named pipe, expected a regular file" in run_reader(tmp_path / "lib.so")


def test_file_without_permission(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(SOUND.data)
    library.chmod(0)
    # Root may read anything, so the reader has to be somebody else.
    message = run_reader(library, as_nobody=os.geteuid() == 0)
    assert message == f"{library}: cannot be opened: Permission denied"


def test_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FormatError, match=r"^lib\.so: cannot be opened: No such file"):
        read_library("lib.so", Scope())


# --- Files that change meanwhile ----------------------------------------------------------


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    shutil.copy(BIN / "libmultiarch.so", library)
    with ByteSource(library) as source:
        host = read_host_elf(source)
        (section,) = (s for s in host.sections if s.name == ".nv_fatbin")
        containers = iter_containers(source, section, Problems())
        next(containers)
        os.truncate(library, section.offset + 100)
        with pytest.raises(FormatError, match="it was truncated") as caught:
            list(containers)
    assert caught.value.offset is not None


def test_file_that_shrinks_under_its_section_headers(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    shutil.copy(BIN / "libmultiarch.so", library)
    with ByteSource(library) as source:
        os.truncate(library, 64)
        with pytest.raises(FormatError, match="it was truncated") as caught:
            read_host_elf(source)
    assert caught.value.offset is not None


def test_reads_are_checked(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(bytes(100))
    with ByteSource(library) as source:
        assert source.read(100, 0) == b""
        assert source.read(96, 4) == bytes(4)
        for offset, length in ((97, 4), (101, 0), (-1, 4), (0, -1), (2**63, 1), (0, 2**63)):
            with pytest.raises(FormatError, match="the file ends at 0x64"):
                source.read(offset, length)


def test_errors_are_of_one_tree() -> None:
    assert issubclass(FormatError, NegativaError)
    assert str(FormatError("lib.so", None, "is empty")) == "lib.so: is empty"
    assert str(FormatError("lib.so", 16, "is bad")) == "lib.so: at offset 0x10: is bad"
