"""Filling code inside a cubin: exactly what was asked for, or a reason why not."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.elf_tables import EHDR, SHDR, SHF_EXECINSTR, SectionHeader
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.models.library import Cubin, Scope
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting.cubin_code import CubinCodeError, CubinTables, overwrite_code
from pytest_negativa.rewriting.layout import Fill, Patch
from tests.support.libraries import BIN

_SH_OFFSET = 0x18


def cubin_of(name: str, arch: str = "sm_90") -> bytes:
    """The first cubin of a library for ``arch`` that isn't relocatable."""
    for element in read_library(BIN / name, Scope()).iter_code():
        content = element.content
        if isinstance(content, Cubin) and str(element.arch) == arch and not content.relocatable:
            data = (BIN / name).read_bytes()
            start = element.payload.start
            stored = data[start : start + element.stored_size]
            return unpack(stored, element.compression, element.unpacked_size)
    raise AssertionError(f"no {arch} cubin in {name}")


class Overwritten(NamedTuple):
    """A cubin without some functions, and where it changed."""

    content: bytes
    filled: tuple[Span, ...]
    tables: tuple[Span, ...]


def overwritten(cubin: bytes, unused: Sequence[Span], value: int) -> Overwritten:
    edits = overwrite_code(cubin, unused, value)
    filled, tables = (
        tuple(Span(c.start, c.end) for c in edits.changes if isinstance(c, kind))
        for kind in (Fill, Patch)
    )
    return Overwritten(bytes(edits.applied_to(cubin, 0)), filled, tables)


def code_of(cubin: bytes) -> dict[str, Span]:
    names = NameTable()
    read = parse_cubin(cubin, names)
    return {
        names.names()[f.name]: Span(f.offset_in_cubin, f.offset_in_cubin + f.code_size)
        for f in (*read.kernels, *read.device_functions)
    }


def section_header(cubin: bytes, offset: int) -> int:
    """Where the header of the code section at ``offset`` stands."""
    header = EHDR.unpack_from(cubin)
    for index in range(header.e_shnum):
        position = header.e_shoff + index * SHDR.size
        section = SHDR.unpack_from(cubin, position)
        if section.sh_flags & SHF_EXECINSTR and section.sh_offset == offset:
            return position
    raise AssertionError(f"no code section at {offset:#x}")


def changed_outside(old: bytes, new: bytes, spans: Sequence[Span]) -> list[int]:
    """Where the two differ, but for ``spans``."""
    assert len(old) == len(new)
    within = {offset for span in spans for offset in range(span.start, span.end)}
    return [i for i in range(len(old)) if old[i] != new[i] and i not in within]


def inside(inner: Span, outer: Span) -> bool:
    return inner != outer and outer.start <= inner.start and inner.end <= outer.end


def elf_of(cubin: bytes) -> ELFFile:
    return ELFFile(io.BytesIO(cubin))


def symbol_table(elf: ELFFile) -> SymbolTableSection:
    table = elf.get_section_by_name(".symtab")
    assert isinstance(table, SymbolTableSection)
    return table


@pytest.mark.parametrize("value", [0, 1, 0xCC])
def test_overwrites_code_and_tells_all_it_changes(value: int) -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)
    unused = sorted([code["calls_chain"], code["calls_printf"]])

    made = overwritten(cubin, unused, value)

    assert made.filled == tuple(unused)
    for span in unused:
        assert made.content[span.start : span.end] == bytes([value]) * span.size
    spans = [*made.filled, *made.tables]
    assert changed_outside(cubin, made.content, spans) == []
    assert [*made.tables] == sorted(made.tables)
    assert all(a.end <= b.start for a, b in pairwise(sorted(spans)))


@pytest.mark.parametrize("library", ["libcallgraph.so", "libpointers.so", "libmode_none.so"])
def test_what_is_gone_has_no_name(library: str) -> None:
    cubin = cubin_of(library)
    code = code_of(cubin)
    kernel = {"libmode_none.so": "shift"}.get(library, "plain")
    kernel = kernel if kernel in code else "calls_chain"
    sections = [span for span in code.values() if not any(inside(span, s) for s in code.values())]
    unused = sorted(span for span in sections if span != code[kernel])

    made = overwritten(cubin, unused, 1)

    gone = {
        name
        for name, span in code.items()
        if any(span == filled or inside(span, filled) for filled in made.filled)
    }
    kept = code.keys() - gone
    assert gone and kernel in kept
    assert code_of(made.content) == {name: code[name] for name in kept}
    words = made.content.replace(b".", b"\0").split(b"\0")
    assert not {name.encode() for name in gone} & set(words)


def test_what_stays_is_as_it_was_to_another_reader() -> None:
    cubin = cubin_of("libpointers.so")
    code = code_of(cubin)

    made = overwritten(cubin, sorted(code.values()), 1)

    gone = {name for name, span in code.items() if span in made.filled}
    assert gone and code.keys() - gone
    old, new = elf_of(cubin), elf_of(made.content)
    stays = []
    for index in range(old.num_sections()):
        was, now = old.get_section(index), new.get_section(index)
        if not now.name and was.name:
            assert was.name.rpartition(".")[2] in gone
            assert now["sh_type"] == "SHT_NULL"
            assert {*now.header.values()} == {0, "SHT_NULL"}
        elif now.name == ".text.":
            assert was.name.removeprefix(".text.") in gone
            assert now["sh_size"] == min(was["sh_size"], 128)
            same = {"sh_name": 0, "sh_size": 0}
            assert dict(now.header) | same == dict(was.header) | same
        else:
            assert (now.name, now.header) == (was.name, was.header)
            stays.append(index)
    tables = (".symtab", ".strtab", ".shstrtab")
    for index in stays:
        if old.get_section(index).name not in tables:
            assert new.get_section(index).data() == old.get_section(index).data()
    symbols = zip(symbol_table(old).iter_symbols(), symbol_table(new).iter_symbols(), strict=True)
    for before, after in symbols:
        if before["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or before["st_shndx"] in stays:
            assert (after.name, after.entry) == (before.name, before.entry)
        else:
            assert (after.name, after["st_value"], after["st_size"]) == ("", 0, 0)
            assert after["st_shndx"] in (before["st_shndx"], "SHN_UNDEF")


def test_prototypes_of_the_call_graph_stay() -> None:
    cubin = cubin_of("libpointers.so")
    code = code_of(cubin)
    names = NameTable()
    read = parse_cubin(cubin, names)
    prototypes = {names.names()[p] for _, p in (*read.address_taken, *read.indirect_calls)}
    assert prototypes

    made = overwritten(cubin, [code["plain"]], 1)

    names = NameTable()
    again = parse_cubin(made.content, names)
    found = {names.names()[p] for _, p in (*again.address_taken, *again.indirect_calls)}
    assert found == prototypes


def test_extended_section_indices_leave_the_tables_alone() -> None:
    cubin = bytearray(cubin_of("libcallgraph.so"))
    code = code_of(bytes(cubin))["calls_chain"]
    symtab = symbol_table(elf_of(bytes(cubin)))
    struct.pack_into("<H", cubin, symtab["sh_offset"] + 24 + 6, 0xFFFF)

    made = overwritten(bytes(cubin), [code], 1)

    assert made.filled == (code,)
    assert made.tables == ()
    assert changed_outside(bytes(cubin), made.content, [code]) == []


@pytest.mark.parametrize(
    ("unused", "left_in_place"),
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
    unused: tuple[str, ...], left_in_place: tuple[str, ...]
) -> None:
    cubin = cubin_of("libpointers.so")
    code = code_of(cubin)

    made = overwritten(cubin, sorted(code[name] for name in unused), 1)

    assert made.filled == tuple(sorted(code[name] for name in {*unused} - {*left_in_place}))
    for name, span in code.items():
        was, now = (data[span.start : span.end] for data in (cubin, made.content))
        assert now == (b"\1" * span.size if span in made.filled else was), name


def test_what_is_a_functions_own_stays_with_its_relocations() -> None:
    """``.nv.constant2.calls_passed`` of another's data, and what is to be written into it."""
    cubin = bytearray(cubin_of("libcallgraph.so"))
    code = code_of(bytes(cubin))
    elf = elf_of(bytes(cubin))
    own = elf.get_section_index(".nv.constant2.calls_passed")
    [symbol] = [
        index
        for index, row in enumerate(symbol_table(elf).iter_symbols())
        if row["st_shndx"] == own and row["st_info"]["type"] == "STT_SECTION"
    ]
    rows = elf.get_section_by_name(".rela.nv.constant4")
    assert rows is not None
    struct.pack_into("<I", cubin, rows["sh_offset"] + 12, symbol)

    made = overwritten(bytes(cubin), sorted([code["calls_passed"], code["calls_chain"]]), 1)

    assert made.filled == (code["calls_chain"],)
    for name in (".nv.constant2.calls_passed", ".rela.nv.constant2.calls_passed"):
        was, now = (elf_of(c).get_section_by_name(name) for c in (bytes(cubin), made.content))
        assert was is not None and now is not None, name
        assert (now.header, now.data()) == (was.header, was.data())


def test_what_is_a_functions_own_is_two_steps_away_at_most() -> None:
    """As relocations of a constant bank. A chain of thousands in a crafted file takes no time."""
    names = b"\0.text.f\0.c.b.a.f\0"
    chain = [names.index(name) for name in (b".a.f\0", b".b.a.f\0", b".c.b.a.f\0")]
    header = EHDR.struct.pack(b"\x7fELF", *[0] * 5, 0, *[0] * 5, 5, 5)
    rows = [
        (0,) * 10,
        (names.index(b".text.f"), 1, 0x6, 0, 0, 0, 0, 0, 0, 0),
        *((name, 1, 0x2, 0, 0, 0, 0, of, 0, 0) for of, name in enumerate(chain, 1)),
        (0, 3, 0, 0, len(header), len(names), 0, 0, 0, 0),
    ]
    sections = list(map(SectionHeader._make, rows))
    assert CubinTables(header + names, sections).owned_by([1]) == {2: 1, 3: 1}


def test_code_with_capsules_is_left_alone() -> None:
    cubin = cubin_of("libcallgraph.so", "sm_100")

    with pytest.raises(CubinCodeError, match="capsules"):
        overwritten(cubin, [code_of(cubin)["calls_chain"]], 1)


@pytest.mark.parametrize(("before", "after"), [(0, -16), (16, 0), (-16, 0), (0, 16)])
def test_a_part_of_a_section_is_not_filled(before: int, after: int) -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)["calls_chain"]

    with pytest.raises(CubinCodeError, match="no section of its own"):
        overwritten(cubin, [Span(code.start + before, code.end + after)], 1)


def test_a_section_that_overlaps_another_is_not_filled() -> None:
    cubin = bytearray(cubin_of("libcallgraph.so"))
    code = code_of(bytes(cubin))
    moved = code["calls_chain"].start + 16
    header = section_header(bytes(cubin), code["calls_chain"].start)
    struct.pack_into("<Q", cubin, header + _SH_OFFSET, moved)

    with pytest.raises(CubinCodeError, match="overlaps"):
        overwritten(bytes(cubin), [Span(moved, moved + code["calls_chain"].size)], 1)


def test_damaged_tables() -> None:
    cubin = cubin_of("libcallgraph.so")
    code = code_of(cubin)["calls_chain"]

    with pytest.raises(CubinCodeError, match="section headers end"):
        overwritten(cubin[:-700], [code], 1)
    for field, value, words in ((62, 999, "no section 999"), (60, 1, "no section of its own")):
        changed = bytearray(cubin)
        struct.pack_into("<H", changed, field, value)
        with pytest.raises(CubinCodeError, match=words):
            overwritten(bytes(changed), [code], 1)
    with pytest.raises(CubinCodeError, match="not a cubin"):
        overwritten(b"\x7fELF" + bytes(100), [code], 1)
