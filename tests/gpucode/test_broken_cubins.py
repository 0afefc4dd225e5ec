"""Cubins and PTX, sound and broken, without a library around them."""

from __future__ import annotations

import struct

import pytest

from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.ptx import parse_ptx
from tests.support.builders import (
    ADDRESS_TAKEN,
    CALLS,
    INDIRECT_CALLS,
    PAIR,
    REFERENCES,
    SYMBOL,
    BuiltCubin,
    CubinSpec,
    build_cubin,
    patched,
)
from tests.support.libraries import BIN

FULL = CubinSpec(
    kernels={"kernel": bytes(48)},
    device_functions={"function": bytes(16)},
    externals=["vprintf"],
    global_data={"global": 4},
    constant_data={"constant": 8},
    calls=[("kernel", "function"), ("kernel", "vprintf")],
)
BUILT = build_cubin(FULL)


def section_field(built: BuiltCubin, section: str, offset: int, layout: str, value: int) -> bytes:
    return patched(built.data, built.header_offsets[section] + offset, layout, value)


def symbol_field(built: BuiltCubin, number: int, offset: int, layout: str, value: int) -> bytes:
    (table,) = struct.unpack_from("<Q", built.data, built.header_offsets[".symtab"] + 24)
    return patched(built.data, table + SYMBOL.size * number + offset, layout, value)


def graph(*rows: tuple[int, int]) -> bytes:
    table = b"".join(PAIR.pack(*row) for row in rows)
    return build_cubin(
        CubinSpec(kernels={"a": bytes(8)}, device_functions={"b": bytes(8)}, call_graph=table)
    ).data


# Symbols of BUILT: 2 is the kernel, 3 the function, 4 vprintf.
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(b"", "not a cubin", id="empty"),
        pytest.param(b"\x7fELF", "not a cubin: starts with 7f454c46", id="magic"),
        pytest.param(BUILT.data[:63], "not a cubin", id="half-a-header"),
        pytest.param(patched(BUILT.data, 18, "H", 62), "not a cubin", id="host"),
        pytest.param(patched(BUILT.data, 4, "B", 1), "not a cubin", id="32-bit"),
        pytest.param(patched(BUILT.data, 40, "Q", 2**64 - 1), "section headers end", id="shoff"),
        pytest.param(patched(BUILT.data, 58, "H", 40), "e_shentsize 40", id="entry-size"),
        pytest.param(patched(BUILT.data, 60, "H", 0xFFFF), "section headers end", id="count"),
        pytest.param(patched(BUILT.data, 60, "H", 0), "no section 1 for", id="no-sections"),
        pytest.param(patched(BUILT.data, 62, "H", 0xFFFF), "no section 65535", id="names-index"),
        pytest.param(
            section_field(BUILT, ".shstrtab", 24, "Q", 2**64 - 1), "section names", id="names-at"
        ),
        pytest.param(
            section_field(BUILT, ".shstrtab", 4, "I", 8), "section names", id="names-without-bytes"
        ),
        pytest.param(
            section_field(BUILT, ".strtab", 32, "Q", 2**63), "symbol names", id="strings-size"
        ),
        pytest.param(
            section_field(BUILT, ".symtab", 24, "Q", 1 << 40), "symbol table at", id="symbols-at"
        ),
        pytest.param(
            section_field(BUILT, ".symtab", 32, "Q", 25), "expected whole entries", id="25-bytes"
        ),
        pytest.param(
            section_field(BUILT, ".symtab", 40, "I", 99), "no section 99 for", id="strings-link"
        ),
        pytest.param(
            section_field(BUILT, ".symtab", 4, "I", 1), "no symbol table", id="no-symbol-table"
        ),
        pytest.param(
            section_field(BUILT, ".strtab", 32, "Q", 3), "has no end", id="name-without-end"
        ),
        pytest.param(symbol_field(BUILT, 2, 0, "I", 2**32 - 1), "has no end", id="name-outside"),
        pytest.param(symbol_field(BUILT, 2, 6, "H", 77), "symbol in section 77", id="in-77"),
        pytest.param(symbol_field(BUILT, 2, 6, "H", 0xFFF1), "symbol in section", id="absolute"),
        pytest.param(symbol_field(BUILT, 2, 8, "Q", 2**64 - 1), "code at", id="code-value"),
        pytest.param(symbol_field(BUILT, 2, 16, "Q", 2**64 - 1), "code at", id="code-size"),
        pytest.param(
            section_field(BUILT, ".text.kernel", 4, "I", 8), "code at", id="code-without-bytes"
        ),
        pytest.param(
            section_field(BUILT, ".text.kernel", 24, "Q", 1 << 40), "code at", id="code-outside"
        ),
        pytest.param(
            section_field(BUILT, ".nv.callgraph", 32, "Q", 2**64 - 8), "call graph", id="graph-size"
        ),
        pytest.param(
            section_field(BUILT, ".nv.callgraph", 32, "Q", 12), "expected whole entries", id="pairs"
        ),
        pytest.param(graph((2, 3)), "belongs to no known part", id="row-before-any-part"),
        pytest.param(graph((0, 0xFFFFFFFB)), "belongs to no known part", id="unknown-part"),
        pytest.param(
            graph((0, CALLS), (2, 3), (0, 0xFFFFFFF0)), "names symbol 0", id="unknown-part-later"
        ),
        pytest.param(graph((0, CALLS), (2, 99)), "names symbol 99", id="callee-99"),
        pytest.param(graph((0, CALLS), (99, 2)), "names symbol 99", id="caller-99"),
        pytest.param(graph((0, CALLS), (2, 1)), "names symbol 1", id="callee-is-a-section"),
        pytest.param(graph((0, CALLS), (2, 0)), "names symbol 0", id="callee-is-nothing"),
        pytest.param(graph((0, REFERENCES), (2, 2**31)), "names symbol", id="reference"),
        pytest.param(graph((0, ADDRESS_TAKEN), (2, 10_000)), "prototype at 0x2710", id="prototype"),
        pytest.param(graph((0, INDIRECT_CALLS), (77, 1)), "names symbol 77", id="indirect"),
    ],
)
def test_broken_cubin(data: bytes, problem: str) -> None:
    with pytest.raises(PayloadError) as caught:
        parse_cubin(data, NameTable())
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["callgraph.sm_90.cubin", "kernels.sm_120.cubin"])
def test_cubin_cut_anywhere(name: str) -> None:
    data = (BIN / name).read_bytes()
    # Behind the section headers come the program headers, which are not needed.
    (table,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    for cut in (*range(0, table + 64 * count, 97), table + 64 * count - 1):
        with pytest.raises(PayloadError):
            parse_cubin(data[:cut], NameTable())


def test_names_are_shared_and_shown_as_ascii() -> None:
    names = NameTable()
    first = parse_cubin(BUILT.data, names)
    second = parse_cubin(BUILT.data, names)
    assert first == second
    assert names.index(b"kernel") == first.kernels[0].name
    names.index(b"caf\xc3\xa9")
    assert names.names()[-1] == "caf\\xc3\\xa9"


def test_neighbours_with_the_same_names_or_others_at_the_same_places() -> None:
    symbols = b"".join(SYMBOL.pack(at, 0x12, 0, 0, 0, 0) for at in (1, 3, 1))
    table = NameTable()
    found = [
        [table.names()[name] for name in parse_cubin(with_symbols(symbols, names), table).externals]
        for names in (b"\0a\0b\0", b"\0a\0b\0", b"\0c\0b\0", b"\0a\0b\0")
    ]
    assert found == [["a", "b", "a"], ["a", "b", "a"], ["c", "b", "c"], ["a", "b", "a"]]


def test_one_long_name_of_many_symbols_is_looked_at_once() -> None:
    # 100,000 symbols, all with the one name of 1 MB: 100 GB if each were copied.
    count = 100_000
    names = b"\0" + b"A" * 1_000_000 + b"\0"
    symbols = SYMBOL.pack(1, 0x12, 0, 0, 0, 0) * count
    data = with_symbols(symbols, names)
    table = NameTable()
    assert parse_cubin(data, table).externals == (0,) * count
    assert len(table.names()) == 1


def with_symbols(symbols: bytes, names: bytes) -> bytes:
    """A cubin of any symbol table: the sound one with both tables put behind it."""
    data = BUILT.data + symbols + names
    at = len(BUILT.data)
    symtab, strtab = BUILT.header_offsets[".symtab"], BUILT.header_offsets[".strtab"]
    data = patched(data, symtab + 24, "QQ", at, len(symbols))
    data = patched(data, strtab + 24, "QQ", at + len(symbols), len(names))
    return patched(data, BUILT.header_offsets[".nv.callgraph"] + 32, "Q", 0)


def test_table_that_ends_one_byte_behind_the_cubin() -> None:
    names = b"\0name\0"
    data = with_symbols(SYMBOL.pack(1, 0x12, 0, 0, 0, 0), names)
    assert len(parse_cubin(data, NameTable()).externals) == 1
    longer = patched(data, BUILT.header_offsets[".strtab"] + 32, "Q", len(names) + 1)
    with pytest.raises(PayloadError, match="symbol names at"):
        parse_cubin(longer, NameTable())


def test_names_that_overlap_in_their_string_table() -> None:
    # Each is a tail of the one before: 3 GB of names from 2 MB.
    symbols = b"".join(SYMBOL.pack(i, 0x12, 0, 0, 0, 0) for i in range(3000))
    data = with_symbols(symbols, b"A" * 1_000_000 + b"\0")
    with pytest.raises(PayloadError, match="names take more than the limit"):
        parse_cubin(data, NameTable())


def test_rows_are_counted_over_all_of_a_library() -> None:
    data = with_symbols(bytes(SYMBOL.size * 1_000_000), b"\0")
    names = NameTable()
    with pytest.raises(PayloadError, match="rows"):
        for _ in range(9):
            parse_cubin(data, names)


# --- PTX ---------------------------------------------------------------------------------


def declared(text: bytes) -> list[str]:
    names = NameTable()
    ptx = parse_ptx(b".version 9.0\n.target sm_90a\n" + text, names)
    return [names.names()[i] for i in ptx.kernels]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", []),
        (b".visible .entry _Z1kPf(\n.param .u64 p\n)\n{ret;}", ["_Z1kPf"]),
        (b".weak .entry k1()", ["k1"]),
        (b".entry k1() {}\n.entry k2() {}\n.entry k1() {}", ["k1", "k2"]),
        (b".visible .func  (.param .b32 out) f(\n.param .b32 a)", []),
        (b".global .align 4 .b8 counter[4];", []),
        (b".entry .attribute(.managed) .align 4 k()", ["k"]),
        (b".entry $odd$name() {}", ["$odd$name"]),
        (b".entry _() {}", []),
        (b".entry", []),
        (b".entry\0\0\0", []),
    ],
)
def test_what_ptx_declares(text: bytes, found: list[str]) -> None:
    assert declared(text) == found


@pytest.mark.parametrize(
    "text",
    [b"", b"\0" * 1000, b".version 9.0", b".target sm_90", b"// .version 9.0\n// .target sm_90\n"],
)
def test_text_that_is_no_ptx(text: bytes) -> None:
    with pytest.raises(PayloadError, match=r"no \.version and \.target"):
        parse_ptx(text, NameTable())


@pytest.mark.parametrize(
    "unit",
    [
        b".entry .a .b .c ",
        b".entry " + b" " * 20,
        b".entry " + b".align 4 " * 12,
        b".entry .attribute(" + b"x" * 99,
        b".entry.entry.entry",
        b" " * 100 + b"\n",
        b".entry .align 1 2 ",
    ],
)
def test_ptx_that_backtracks_takes_linear_time(unit: bytes) -> None:
    # Quadratic time would be hours.
    text = unit * (2_000_000 // len(unit))
    declared(text)
