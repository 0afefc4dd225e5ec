"""The compiled fixtures against what cuobjdump says of them; see tests/fixtures/README.md."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from pytest_negativa.arch import ElementKind, SmArch
from pytest_negativa.gpucode.cubin import cubin_arch, parse_cubin
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.models.library import (
    Compression,
    Cubin,
    Element,
    LibraryMap,
    Region,
    Scope,
    Section,
)
from tests.support.builders import (
    HostSection,
    build_host,
    build_id_note,
    fatbin_section,
    soname_sections,
)
from tests.support.invariants import check_map
from tests.support.libraries import BIN, MANIFEST

FILES: dict[str, Any] = MANIFEST["files"]
ALL = sorted(FILES)
BARE = (".cubin", ".fatbin", ".ptx", ".ltoir", ".bc", ".a")
HOSTS = [name for name in ALL if not name.endswith(BARE)]
CUBINS = [name for name in ALL if name.endswith(".cubin")]
# cuobjdump looks into these sections, and lists linked code before relocatable code.
SEEN_BY_CUOBJDUMP = (".nv_fatbin", "__nv_relfatbin")

Fact = dict[str, Any]


def path_of(name: str) -> Path:
    return BIN / name


def map_of(name: str, scope: Scope | None = None) -> LibraryMap:
    library_map = read_library(path_of(name), scope or Scope())
    check_map(library_map)
    assert library_map.problems == ()
    return library_map


def content_of(data: bytes, element: Element) -> bytes:
    stored = data[element.payload.start : element.payload.start + element.stored_size]
    return unpack(stored, element.compression, element.unpacked_size)


def sections_of(library_map: LibraryMap) -> dict[str, Section]:
    return {section.name: section for section in library_map.sections}


def elements_in_order_of_cuobjdump(library_map: LibraryMap) -> list[Element]:
    sections = sections_of(library_map)
    return [
        element
        for name in SEEN_BY_CUOBJDUMP
        if name in sections
        for region in sections[name].regions
        for element in region.elements
    ]


def cubin_facts(cubin: Cubin, names: tuple[str, ...]) -> Fact:
    return {
        "kernels": sorted(names[f.name] for f in cubin.kernels),
        "functions": sorted(names[f.name] for f in cubin.device_functions),
        "undefined_functions": sorted(names[i] for i in cubin.externals),
        "data": sorted(names[d] for d in cubin.data),
    }


def element_facts(element: Element, names: tuple[str, ...]) -> Fact:
    """An element in the manifest's words."""
    assert element.unreadable is None
    facts: Fact = {
        "kind": element.kind.name,
        "arch": str(element.arch),
        "compressed": element.compression is not Compression.NONE,
        "identifier": element.identifier,
    }
    if isinstance(element.content, Cubin):
        facts |= cubin_facts(element.content, names)
    return facts


def expected_facts(element: Fact) -> Fact:
    """The manifest's, as far as the map has a word for it."""
    facts = {k: value for k, value in element.items() if k not in ("code_version", "options")}
    facts.setdefault("identifier", None)
    return facts


def test_manifest_is_of_these_binaries() -> None:
    assert {path.name for path in (BIN).iterdir()} == set(ALL)
    for name in ALL:
        data = path_of(name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (
            FILES[name]["size"],
            FILES[name]["sha256"],
        ), name


@pytest.mark.parametrize("name", HOSTS)
def test_elements_are_those_of_cuobjdump(name: str) -> None:
    library_map = map_of(name)
    elements = elements_in_order_of_cuobjdump(library_map)
    found = [element_facts(e, library_map.names) for e in elements]
    assert found == [expected_facts(e) for e in FILES[name]["cuobjdump"]["elements"]]
    listing = FILES[name]["cuobjdump"]
    assert len(listing["lelf"]) == sum(e.kind is ElementKind.CUBIN for e in elements)
    assert len(listing["lptx"]) == sum(e.kind is ElementKind.PTX for e in elements)


@pytest.mark.parametrize("name", [n for n in HOSTS if "cubins" in FILES[n]["cuobjdump"]])
def test_unpacked_cubins_are_those_of_cuobjdump(name: str) -> None:
    data = path_of(name).read_bytes()
    cubins = [
        content_of(data, element)
        for element in elements_in_order_of_cuobjdump(map_of(name))
        if element.kind is ElementKind.CUBIN
    ]
    expected = FILES[name]["cuobjdump"]["cubins"]
    assert [(len(c), hashlib.sha256(c).hexdigest()) for c in cubins] == [
        (c["size"], c["sha256"]) for c in expected
    ]


@pytest.mark.parametrize("name", [n for n in HOSTS if "pieces" in FILES[n]])
def test_pieces_lie_where_the_build_put_them(name: str) -> None:
    library_map = map_of(name)
    expected = FILES[name]["pieces"]
    found: dict[tuple[str, int], Region | Element] = {}
    for section in library_map.sections:
        found |= {(section.name, region.span.start): region for region in section.regions}
        found |= {(section.name, frame.span.start): frame for frame in section.frames}
    gpu_code = [p for p in expected if "elements" in p]
    assert set(found) == {(p["section"], p["offset"]) for p in gpu_code}
    for piece in gpu_code:
        container = found[piece["section"], piece["offset"]]
        assert container.span.size == piece["size"]
        if isinstance(container, Region):
            facts = [element_facts(e, library_map.names) for e in container.elements]
            assert facts == [expected_facts(e) for e in piece["elements"]]
        else:
            check_frame(container, piece, library_map.names)


def check_frame(frame: Element, piece: Fact, names: tuple[str, ...]) -> None:
    assert isinstance(frame.content, Cubin)
    assert frame.unpacked_size == piece["content"]["size"]
    assert frame.content.sha256 == piece["content"]["sha256"]
    (element,) = piece["elements"]
    assert cubin_facts(frame.content, names) == {
        key: element[key] for key in ("kernels", "functions", "undefined_functions", "data")
    }
    # kernels.sm_80.cubin.zst
    assert str(frame.arch) == piece["piece"].split(".")[1]


def test_false_hits_are_there() -> None:
    assert path_of("libfalse_hits.so").read_bytes().count(bytes.fromhex("50ed55ba")) >= 7


def test_region_of_no_element_counts_in_a_fatbin_section_alone(tmp_path: Path) -> None:
    (section,) = map_of("libempty_region.so").sections
    assert [len(r.elements) for r in section.regions] == [2, 0, 1]
    assert section.regions[1].span.size == 16
    library = tmp_path / "lib.so"
    empty = path_of("empty.fatbin").read_bytes()
    library.write_bytes(build_host([fatbin_section(empty, name=".rodata")]).data)
    assert read_library(library, Scope()).sections == ()


def test_every_offset_and_field_of_the_golden_library() -> None:
    golden = MANIFEST["golden"]
    library_map = map_of(golden["file"])
    (section,) = library_map.sections
    assert section.name == golden["section"]["name"]
    assert (section.span.start, section.span.size) == (
        golden["section"]["offset"],
        golden["section"]["size"],
    )
    found: list[Fact] = [
        {
            "offset": region.span.start,
            "end": region.span.end,
            "elements": [
                {
                    "header_offset": e.header_offset,
                    "payload_offset": e.payload.start,
                    "size": e.payload.size,
                    "end": e.payload.end,
                    "compressed_size": e.stored_size,
                    "uncompressed_size": e.unpacked_size,
                    "kind": e.kind_number,
                    "kind_name": e.kind.name,
                    "arch": e.arch.major * 10 + e.arch.minor,
                }
                for e in region.elements
            ],
        }
        for region in section.regions
    ]
    kept = set(found[0]["elements"][0])
    expected = [
        {
            "offset": region["offset"],
            "end": region["end"],
            "elements": [{k: e[k] for k in kept} for e in region["elements"]],
        }
        for region in golden["regions"]
    ]
    assert found == expected


def test_variables_of_all_memory_are_data() -> None:
    library_map = map_of("libglobals.so")
    for element in library_map.iter_code():
        assert isinstance(element.content, Cubin)
        names = library_map.names
        assert {names[d] for d in element.content.data} == {
            "device_counter",
            "device_initialised",
            "managed_value",
            "constant_table",
        }


def test_suffix_of_a_family_is_stated_by_the_element_alone() -> None:
    library_map = map_of("libsuffix.so")
    data = path_of("libsuffix.so").read_bytes()
    (family,) = (
        e
        for e in library_map.iter_code()
        if e.arch == SmArch(10, 0, "f") and e.kind is ElementKind.CUBIN
    )
    assert isinstance(family.content, Cubin)
    assert cubin_arch(content_of(data, family)) == SmArch(10, 0) == family.content.arch
    # And so cuobjdump's listing, made from the cubins, names it after the plain arch.
    assert "libsuffix.4.sm_100.cubin" in FILES["libsuffix.so"]["cuobjdump"]["lelf"]


EDGES = {
    "calls": {
        ("calls_printf", "vprintf"),
        ("_Z9recursivei", "_Z9recursivei"),
        ("calls_recursive", "_Z9recursivei"),
        ("calls_shared", "_Z13shared_by_twof"),
        ("_Z12chain_middlef", "_Z9chain_endf"),
        ("calls_chain", "_Z12chain_middlef"),
        ("calls_chain", "_Z13shared_by_twof"),
    },
    "references": {
        ("calls_virtual", "_ZN6Square4areaEf"),
        ("calls_virtual", "_ZN6Circle4areaEf"),
        ("takes_address", "_Z7add_onef"),
        ("calls_pointer", "_Z7add_onef"),
        ("calls_pointer", "_Z7add_twof"),
    },
    "address_taken": {
        ("_Z7add_onef", "#ii"),
        ("_Z7add_twof", "#ii"),
        ("_ZN6Square4areaEf", "#ili"),
        ("_ZN6Circle4areaEf", "#ili"),
    },
    "indirect_calls": {
        ("calls_virtual", "#ili"),
        ("calls_passed", "#ii"),
        ("calls_pointer", "#ii"),
    },
}


def call_graph(cubin: Cubin, names: tuple[str, ...]) -> dict[str, set[tuple[str, str]]]:
    graph = {
        "calls": cubin.calls,
        "references": cubin.references,
        "address_taken": cubin.address_taken,
        "indirect_calls": cubin.indirect_calls,
    }
    assert all(len(rows) == len(set(rows)) for rows in graph.values())
    return {part: {(names[a], names[b]) for a, b in rows} for part, rows in graph.items()}


def test_call_graph_of_linked_and_of_relocatable_code() -> None:
    library_map = map_of("libcallgraph_rdc.so")
    cubins = [e.content for e in library_map.iter_code()]
    relocatable = []
    for cubin in cubins:
        assert isinstance(cubin, Cubin)
        assert call_graph(cubin, library_map.names) == EDGES
        relocatable.append(cubin.relocatable)
    assert sorted(relocatable) == [False] * 3 + [True] * 3


def iter_images() -> Iterator[tuple[str, bytes]]:
    for name in CUBINS:
        yield name, path_of(name).read_bytes()
    for name in ("libmultiarch.so", "libcallgraph_rdc.so", "libabi7.so", "libnames.so"):
        data = path_of(name).read_bytes()
        for element in map_of(name).iter_code():
            if element.kind is ElementKind.CUBIN:
                yield f"{name} {element.arch}", content_of(data, element)


def test_code_offsets_and_sizes_against_pyelftools() -> None:
    for label, image in iter_images():
        names = NameTable()
        cubin = parse_cubin(image, names)
        texts = names.names()
        found = {
            texts[f.name]: (f.offset_in_cubin, f.code_size)
            for f in (*cubin.kernels, *cubin.device_functions)
        }
        elf = ELFFile(io.BytesIO(image))
        expected = {}
        symbols = elf.get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        for symbol in symbols.iter_symbols():
            where = symbol["st_shndx"]
            if symbol["st_info"]["type"] == "STT_FUNC" and where != "SHN_UNDEF":
                section = elf.get_section(where)
                offset = section["sh_offset"] + symbol["st_value"]
                expected[symbol.name] = (offset, symbol["st_size"])
                assert section.name.startswith(".text."), label
        assert found == expected, label
        assert all(size > 0 for _, size in found.values()), label


def test_identity_of_a_library() -> None:
    identity = map_of("libmultiarch.so").library
    elf = ELFFile(io.BytesIO(path_of("libmultiarch.so").read_bytes()))
    notes = elf.get_section_by_name(".note.gnu.build-id")
    assert isinstance(notes, NoteSection)
    note = next(iter(notes.iter_notes()))
    assert identity.build_id == note["n_desc"]
    assert len(note["n_desc"]) == 40
    assert identity.soname is None
    assert identity.path == str(path_of("libmultiarch.so").resolve())


def test_soname_and_build_id_of_a_built_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    sections: list[HostSection] = [*soname_sections("libnamed.so.1", 0), build_id_note(b"\xab" * 8)]
    library.write_bytes(build_host(sections, machine=183).data)
    identity = read_library(library, Scope()).library
    assert (identity.soname, identity.build_id) == ("libnamed.so.1", "ab" * 8)
