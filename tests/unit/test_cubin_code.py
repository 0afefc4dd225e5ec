"""Filling code inside a cubin: exactly what was asked for, or a reason why not."""

from __future__ import annotations

import struct

import pytest

from pytest_negativa.gpucode.cubin import SECTION_HEADER, parse_cubin
from pytest_negativa.gpucode.elf import ELF_HEADER
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.models.library import Cubin, Scope
from pytest_negativa.models.plan import CodeRange
from pytest_negativa.rewriting.cubin_code import CubinCodeError, fill_code
from tests.unit.libraries import BIN

_SH_OFFSET = 0x18


def cubin_of(name: str, arch: str = "sm_90") -> bytes:
    """The first cubin of a library for ``arch`` that isn't relocatable."""
    for element in read_library(BIN / name, Scope()).iter_elements():
        content = element.content
        if isinstance(content, Cubin) and str(element.arch) == arch and not content.relocatable:
            data = (BIN / name).read_bytes()
            start = element.payload.start
            stored = data[start : start + element.stored_size]
            return unpack(stored, element.compression, element.unpacked_size)
    raise AssertionError(f"no {arch} cubin in {name}")


def code_of(cubin: bytes) -> dict[str, CodeRange]:
    names = NameTable()
    read = parse_cubin(cubin, names)
    return {
        names.names()[f.name]: CodeRange(f.offset_in_cubin, f.offset_in_cubin + f.code_size)
        for f in (*read.kernels, *read.device_functions)
    }


def section_header(cubin: bytes, offset: int) -> int:
    """Where the header of the code section at ``offset`` stands."""
    header = ELF_HEADER.unpack_from(cubin)
    for index in range(header[12]):
        position = header[6] + index * SECTION_HEADER.size
        fields = SECTION_HEADER.unpack_from(cubin, position)
        if fields[2] & 0x4 and fields[4] == offset:
            return int(position)
    raise AssertionError(f"no code section at {offset:#x}")


@pytest.mark.parametrize("value", [0, 1, 0xCC])
def test_fills_code_and_nothing_else(value: int) -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)
    unused = sorted([code["calls_chain"], code["calls_printf"]])

    filled, spans = fill_code(cubin, unused, value)

    expected = bytearray(cubin)
    for span in unused:
        for offset in range(span.start, span.end):
            expected[offset] = value
    assert filled == bytes(expected) != cubin
    assert spans == tuple(unused)
    # Names, sizes and call graph are as before.
    assert code_of(filled) == code


@pytest.mark.parametrize(
    ("unused", "spared"),
    [
        (("calls_directly", "_Z6calledf"), ()),
        # Whose caller was given back, the slow path of a division too, which it calls in turn.
        (
            ("_Z6calledf", "__cuda_sm3x_div_rn_noftz_f32_slowpath"),
            ("_Z6calledf", "__cuda_sm3x_div_rn_noftz_f32_slowpath"),
        ),
        (("_Z7in_codef", "plain"), ("_Z7in_codef",)),  # in the code of takes_address
        (("_Z9in_globalf",), ("_Z9in_globalf",)),  # in .nv.global.init
        (("_Z6unreadf",), ("_Z6unreadf",)),  # there, too, and nothing reads it
        (("_Z11in_constantf",), ("_Z11in_constantf",)),  # in .nv.constant3
        (("_ZN6Square4areaEf",), ("_ZN6Square4areaEf",)),  # in a vtable
        # Reached by way of a function of the table.
        (("_Z8calls_onf", "_Z14behind_pointerf"), ("_Z8calls_onf", "_Z14behind_pointerf")),
    ],
)
def test_relocations_are_the_second_witness(
    unused: tuple[str, ...], spared: tuple[str, ...]
) -> None:
    cubin = cubin_of("libpointers.so")
    code = code_of(cubin)

    filled, spans = fill_code(cubin, sorted(code[name] for name in unused), 1)

    assert spans == tuple(sorted(code[name] for name in {*unused} - {*spared}))
    for name, span in code.items():
        was, now = (data[span.start : span.end] for data in (cubin, filled))
        assert now == (b"\1" * span.size if span in spans else was), name


def test_code_in_two_forms_is_left_alone() -> None:
    cubin = cubin_of("libcallgraph.so", "sm_100")

    with pytest.raises(CubinCodeError, match="second form"):
        fill_code(cubin, [code_of(cubin)["calls_chain"]], 1)


@pytest.mark.parametrize(("before", "after"), [(0, -16), (16, 0), (-16, 0), (0, 16)])
def test_a_part_of_a_section_is_not_filled(before: int, after: int) -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)["calls_chain"]

    with pytest.raises(CubinCodeError, match="no section of its own"):
        fill_code(cubin, [CodeRange(code.start + before, code.end + after)], 1)


def test_a_section_that_overlaps_another_is_not_filled() -> None:
    cubin = bytearray(cubin_of("libcallgraph.so"))
    code = code_of(bytes(cubin))
    moved = code["calls_chain"].start + 16
    header = section_header(bytes(cubin), code["calls_chain"].start)
    struct.pack_into("<Q", cubin, header + _SH_OFFSET, moved)

    with pytest.raises(CubinCodeError, match="overlaps"):
        fill_code(bytes(cubin), [CodeRange(moved, moved + code["calls_chain"].size)], 1)


def test_damaged_tables() -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)["calls_chain"]

    with pytest.raises(CubinCodeError, match="section headers end"):
        fill_code(cubin[:-700], [code], 1)
    with pytest.raises(CubinCodeError, match="not a cubin"):
        fill_code(b"\x7fELF" + bytes(100), [code], 1)
