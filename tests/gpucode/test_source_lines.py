"""The source lines of kernels: fixtures of nvcc, and damaged line programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.source_lines import (
    SourceLine,
    iter_function_lines,
    read_source_lines,
)
from pytest_negativa.models.library import Scope
from tests.support.libraries import BIN, TESTS

KERNELS = "/tmp/pytest-negativa-fixtures/kernels.cu"
LINES = {"scale": SourceLine(KERNELS, 2), "shift": SourceLine(KERNELS, 3)}


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
        "_ZN1n3mulILi1EEEvPf": SourceLine(f"{FOLDER}/lines.cu", 6),
        "_ZN1n3mulILi2EEEvPf": SourceLine(f"{FOLDER}/lines.cu", 6),
        "_ZN1n5otherEPf": SourceLine(f"{FOLDER}/lines.cu", 9),
        "plain": SourceLine(f"{FOLDER}/lines.cu", 17),
    }


@given(st.data())
def test_damaged_line_information_is_no_fault(data: st.DataObject) -> None:
    start = CUBIN.index(FOLDER.encode()) - 24  # the folders follow the header
    damaged = bytearray(CUBIN)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(start, start + 0x140))
        damaged[at] = data.draw(st.integers(0, 255))
    for _name, line in iter_function_lines(bytes(damaged)):
        assert line.line > 0


@given(st.integers(0x400, 0x6000))
def test_a_cut_cubin_is_refused(end: int) -> None:
    with pytest.raises(PayloadError):
        list(iter_function_lines(CUBIN[:end][:-1]))
