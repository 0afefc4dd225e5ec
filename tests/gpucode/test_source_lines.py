"""The source lines of kernels: fixtures of nvcc, and damaged line programs."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import section_bytes, section_headers
from pytest_negativa.gpucode.elf_tables import EHDR, SHDR, string_at
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.source_lines import (
    iter_function_lines,
    read_source_lines,
)
from pytest_negativa.models.library import Scope
from tests.support.libraries import BIN, TESTS

KERNELS = "/tmp/pytest-negativa-fixtures/kernels.cu"
LINES = {"scale": (KERNELS, 2), "shift": (KERNELS, 3)}


@pytest.mark.parametrize("name", ["liblineinfo.so", "libdebug.so"])
def test_lines_of_a_library(name: str) -> None:
    assert read_source_lines(read_library(BIN / name, Scope())) == LINES


def test_no_line_information() -> None:
    assert read_source_lines(read_library(BIN / "libmultiarch.so", Scope())) == {}


def test_a_library_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "liba.so"
    shutil.copy(BIN / "liblineinfo.so", path)
    library_map = read_library(path, Scope())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="changed while it was read"):
        read_source_lines(library_map)


FOLDER = "/tmp/pytest-negativa-fixtures"
CUBIN = (TESTS / "data" / "lines" / "lines.sm_90.cubin").read_bytes()


def test_templates_and_inlined_functions() -> None:
    """A kernel that begins with inlined code of a header still has its own line."""
    assert dict(iter_function_lines(CUBIN)) == {
        "_ZN1n3mulILi1EEEvPf": (f"{FOLDER}/lines.cu", 6),
        "_ZN1n3mulILi2EEEvPf": (f"{FOLDER}/lines.cu", 6),
        "_ZN1n5otherEPf": (f"{FOLDER}/lines.cu", 9),
        "plain": (f"{FOLDER}/lines.cu", 17),
    }


@given(st.data())
def test_damaged_line_information_is_no_fault(data: st.DataObject) -> None:
    start = CUBIN.index(FOLDER.encode()) - 24  # the folders follow the header
    damaged = bytearray(CUBIN)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(start, start + 0x140))
        damaged[at] = data.draw(st.integers(0, 255))
    for _name, line in iter_function_lines(bytes(damaged)):
        assert line[1] > 0


def line_unit(folder: bytes, files: int) -> bytes:
    """A unit without sequences; all files are in one folder."""
    tables = bytes(2) + b"\0\1\1" + folder + b"\0\0" + b"a\0\1\0\0" * files + b"\0"
    return struct.pack("<IHI", 6 + len(tables), 2, len(tables)) + tables


def with_units(units: bytes) -> bytes:
    """The cubin with more units behind its own, whose offsets stay."""
    data = bytearray(CUBIN)
    sections = section_headers(CUBIN)
    names = sections[EHDR.unpack_from(CUBIN).e_shstrndx]
    strings = section_bytes(CUBIN, names, "names")
    [index] = (n for n, s in enumerate(sections) if string_at(strings, s.sh_name) == b".debug_line")
    program = section_bytes(CUBIN, sections[index], "lines") + units
    header = EHDR.unpack_from(CUBIN).e_shoff + index * SHDR.size
    struct.pack_into("<QQ", data, header + 24, len(data), len(program))  # sh_offset, sh_size
    return bytes(data) + program


@pytest.mark.parametrize(
    "units",
    [line_unit(b"", 0) * 10_000, line_unit(b"long" * 20_000, 10_000)],
    ids=["many units", "many files of a long folder"],
)
def test_memory_grows_with_the_section(units: bytes) -> None:
    data = with_units(units)
    tracemalloc.start()
    lines = dict(iter_function_lines(data))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines == dict(iter_function_lines(CUBIN))
    assert peak < 16 << 20


@given(st.integers(0x400, 0x6000))
def test_a_cut_cubin_is_refused(end: int) -> None:
    with pytest.raises(PayloadError):
        list(iter_function_lines(CUBIN[:end][:-1]))
