"""Property tests: what is built is what is read, and no bytes lead to anything but our errors."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    SmArch,
    choose_elements,
    cubin_runs_on,
)
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.ptx import DIRECTIVES, find_entries, parse_ptx
from pytest_negativa.gpucode.scan import ALL_MAGICS, REGION_MAGICS
from pytest_negativa.gpucode.search import Find, load_search, search_by
from pytest_negativa.models.library import Compression, Cubin, Element, Ptx, Scope
from pytest_negativa.models.spans import Span
from tests.support import builders
from tests.support.builders import CubinSpec, ElementSpec, HostSection
from tests.support.invariants import check_map
from tests.support.libraries import BIN

NAMES = st.text(alphabet=string.ascii_letters + string.digits + "_$", min_size=1, max_size=40)
PTX_NAMES = NAMES.map(lambda name: "k" + name)


@st.composite
def cubin_specs(draw: st.DrawFn) -> CubinSpec:
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    kinds = [draw(st.integers(0, 4)) for _ in names]
    of_kind = [[n for n, k in zip(names, kinds, strict=True) if k == kind] for kind in range(5)]
    code = st.binary(max_size=64)
    functions = [*of_kind[0], *of_kind[1], *of_kind[2]]

    def edges(left: list[str], right: list[str]) -> list[tuple[str, str]]:
        if not left or not right:
            return []
        return draw(st.lists(st.tuples(st.sampled_from(left), st.sampled_from(right)), max_size=6))

    prototypes = ["#ii", "#iil", ""]
    return CubinSpec(
        arch=draw(st.sampled_from([75, 80, 90, 100, 120])),
        abi=draw(st.sampled_from([7, 8])),
        arch_specific=draw(st.booleans()),
        relocatable=draw(st.booleans()),
        kernels={n: draw(code) for n in of_kind[0]},
        device_functions={n: draw(code) for n in of_kind[1]},
        externals=of_kind[2],
        global_data={n: draw(st.integers(0, 1000)) for n in of_kind[3]},
        constant_data={n: draw(st.integers(0, 1000)) for n in of_kind[4]},
        calls=edges(functions, functions),
        references=edges(functions, functions),
        address_taken=edges(functions, prototypes),
        indirect_calls=edges(functions, prototypes),
    )


class BuiltElement(NamedTuple):
    spec: ElementSpec
    cubin: CubinSpec | None = None
    ptx_kernels: tuple[str, ...] = ()


@st.composite
def built_elements(draw: st.DrawFn) -> BuiltElement:
    flags = builders.LINUX_64 | draw(st.sampled_from([0, builders.LZ4, builders.ZSTD]))
    flags |= draw(st.sampled_from([0, builders.ARCH_SPECIFIC, builders.FAMILY_SPECIFIC]))
    kind = draw(st.sampled_from([builders.PTX, builders.CUBIN, builders.LTO_IR, 3]))
    cubin = None
    kernels: tuple[str, ...] = ()
    if kind == builders.CUBIN:
        cubin = draw(cubin_specs())
        content = builders.build_cubin(cubin).data
    elif kind == builders.PTX:
        kernels = tuple(draw(st.lists(PTX_NAMES, unique=True, max_size=5)))
        content = builders.build_ptx(kernels)
    else:
        content = draw(st.binary(max_size=200))
    packed = flags & (builders.LZ4 | builders.ZSTD)
    spec = ElementSpec(
        content=content,
        kind=kind,
        arch=draw(st.integers(10, 200)),
        flags=flags,
        identifier=draw(st.sampled_from([b"", b"a.cu", b"some/other_file.cu"])),
        options=draw(st.sampled_from([None, b"-O3", b" -v --maxrregcount 32 "])),
        # Without compression nothing tells padding from content.
        padding=draw(st.integers(0, 40)) if packed else 0,
    )
    return BuiltElement(spec, cubin, kernels)


class Piece(NamedTuple):
    """What a section is made of: a region, a frame of a cubin, or other bytes."""

    data: bytes
    region: tuple[BuiltElement, ...] | None = None
    frame: CubinSpec | None = None


@st.composite
def pieces(draw: st.DrawFn, *, frames: bool) -> Piece:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Piece(bytes(8 * draw(st.integers(1, 60))))
    if kind == 1 and frames:
        cubin = draw(cubin_specs())
        content = builders.build_cubin(cubin).data
        return Piece(builders.zstd_frame(content, checksum=draw(st.booleans())), frame=cubin)
    elements = tuple(draw(st.lists(built_elements(), min_size=1, max_size=4)))
    return Piece(builders.build_region([e.spec for e in elements]), region=elements)


def names_in(library_names: tuple[str, ...], cubin: Cubin) -> CubinSpec:
    """The builder's words for what was read; code as zeros."""
    n = library_names
    return CubinSpec(
        relocatable=cubin.relocatable,
        kernels={n[f.name]: bytes(f.code_size) for f in cubin.kernels},
        device_functions={n[f.name]: bytes(f.code_size) for f in cubin.device_functions},
        externals=[n[i] for i in cubin.externals],
        global_data=dict.fromkeys((n[i] for i in cubin.data), 0),
        calls=[(n[a], n[b]) for a, b in cubin.calls],
        references=[(n[a], n[b]) for a, b in cubin.references],
        address_taken=[(n[a], n[b]) for a, b in cubin.address_taken],
        indirect_calls=[(n[a], n[b]) for a, b in cubin.indirect_calls],
    )


def without_code(spec: CubinSpec) -> CubinSpec:
    return CubinSpec(
        relocatable=spec.relocatable,
        kernels={name: bytes(len(code)) for name, code in spec.kernels.items()},
        device_functions={name: bytes(len(c)) for name, c in spec.device_functions.items()},
        externals=spec.externals,
        global_data=dict.fromkeys((*spec.global_data, *spec.constant_data), 0),
        calls=spec.calls,
        references=spec.references,
        address_taken=spec.address_taken,
        indirect_calls=spec.indirect_calls,
    )


def check_cubin(names: tuple[str, ...], found: Cubin, spec: CubinSpec) -> None:
    assert names_in(names, found) == without_code(spec)
    image = builders.build_cubin(spec).data
    for function in (*found.kernels, *found.device_functions):
        code = {**spec.kernels, **spec.device_functions}[names[function.name]]
        end = function.offset_in_cubin + function.code_size
        assert image[function.offset_in_cubin : end] == code
    assert found.arch == SmArch.from_number(spec.arch, "a" if spec.arch_specific else "")


def check_element(names: tuple[str, ...], data: bytes, found: Element, built: BuiltElement) -> None:
    spec = built.spec
    assert data[found.header_offset : found.payload.end] == builders.build_element(spec)
    if found.unreadable is None:
        stored = data[found.payload.start : found.payload.start + found.stored_size]
        assert unpack(stored, found.compression, found.unpacked_size) == spec.content
    assert found.kind_number == spec.kind
    assert found.arch.major * 10 + found.arch.minor == spec.arch
    assert found.identifier == (spec.identifier.decode() or None)
    if built.cubin is not None:
        assert isinstance(found.content, Cubin)
        check_cubin(names, found.content, built.cubin)
    elif spec.kind == builders.PTX:
        assert isinstance(found.content, Ptx)
        assert tuple(names[i] for i in found.content.kernels) == built.ptx_kernels
    elif spec.kind == builders.LTO_IR:
        assert found.content is None
    else:
        assert found.unreadable == "element kind 3 is not known"


@given(
    st.data(),
    st.lists(
        st.sampled_from([".nv_fatbin", "__nv_relfatbin", ".rodata", ".ldata", ".data"]),
        unique=True,
        max_size=3,
    ),
)
def test_what_was_built_is_what_is_found(
    tmp_path: Path, data: st.DataObject, section_names: list[str]
) -> None:
    contents = []
    for name in section_names:
        strict = name in (".nv_fatbin", "__nv_relfatbin")
        contents.append(data.draw(st.lists(pieces(frames=not strict), max_size=4)))
    host = builders.build_host(
        [
            HostSection(name=name, data=b"".join(builders.padded(p.data) for p in content))
            for name, content in zip(section_names, contents, strict=True)
        ]
    )
    library = tmp_path / "lib.so"
    library.write_bytes(host.data)
    library_map = read_library(library, Scope())
    check_map(library_map)
    assert library_map.problems == ()
    expected: dict[int, Piece] = {}
    for start, content in zip(host.offsets, contents, strict=True):
        position = start
        for piece in content:
            if piece.region is not None or piece.frame is not None:
                expected[position] = piece
            position += len(builders.padded(piece.data))
    found: dict[int, object] = {r.span.start: r for r in library_map.iter_regions()}
    found |= {f.span.start: f for f in library_map.iter_frames()}
    assert set(found) == set(expected)
    for region in library_map.iter_regions():
        piece = expected[region.span.start]
        assert piece.region is not None
        assert region.span.size == len(piece.data)
        assert len(region.elements) == len(piece.region)
        for element, built in zip(region.elements, piece.region, strict=True):
            check_element(library_map.names, host.data, element, built)
    for frame in library_map.iter_frames():
        check_frame(library_map.names, frame, expected[frame.span.start])


def check_frame(names: tuple[str, ...], frame: Element, piece: Piece) -> None:
    assert piece.frame is not None
    assert frame.span.size == len(piece.data)
    assert frame.unpacked_size == len(builders.build_cubin(piece.frame).data)
    assert isinstance(frame.content, Cubin)
    check_cubin(names, frame.content, piece.frame)


@st.composite
def mutations(draw: st.DrawFn, size: int) -> list[tuple[int, bytes]]:
    value = st.one_of(
        st.binary(min_size=1, max_size=8),
        st.sampled_from(
            [b"\0" * 8, b"\xff" * 4, b"\xff" * 8, b"\x50\xed\x55\xba", b"\x28\xb5\x2f\xfd"]
        ),
    )
    return draw(st.lists(st.tuples(st.integers(0, size - 1), value), min_size=1, max_size=6))


def mutated(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(data)
    for offset, value in changes:
        changed[offset : offset + len(value)] = value
    return bytes(changed[: len(data)])


def a_library() -> bytes:
    cubin = CubinSpec(
        kernels={"kernel": bytes(32)},
        device_functions={"function": bytes(16)},
        externals=["vprintf"],
        global_data={"global": 4},
        calls=[("kernel", "function")],
        indirect_calls=[("kernel", "#ii")],
    )
    image = builders.build_cubin(cubin).data
    region = builders.build_region(
        [
            ElementSpec(content=image, identifier=b"a.cu"),
            ElementSpec(content=image, flags=builders.LZ4),
            ElementSpec(content=builders.build_ptx(), kind=builders.PTX, options=b"-v"),
        ]
    )
    return builders.build_host(
        [
            *builders.soname_sections("libfuzz.so", 0),
            builders.build_id_note(bytes(20)),
            builders.fatbin_section(region, region),
            builders.fatbin_section(region, name=".rodata"),
            HostSection(name=".ldata", data=builders.zstd_frame(image, checksum=True)),
        ]
    ).data


@pytest.mark.parametrize("name", ["built", "libempty_region.so", "libframes.so"])
@given(data=st.data())
def test_changed_bytes_lead_to_a_map_or_to_our_error(
    tmp_path: Path, data: st.DataObject, name: str
) -> None:
    sound = a_library() if name == "built" else (BIN / name).read_bytes()
    library = tmp_path / "lib.so"
    library.write_bytes(mutated(sound, data.draw(mutations(len(sound)))))
    try:
        library_map = read_library(library, Scope())
    except FormatError as e:
        assert str(e).startswith(f"{library}:")
    else:
        check_map(library_map)


@given(spec=cubin_specs(), data=st.data())
def test_changed_cubin_is_read_or_refused(spec: CubinSpec, data: st.DataObject) -> None:
    image = builders.build_cubin(spec).data
    names = NameTable()
    try:
        parse_cubin(mutated(image, data.draw(mutations(len(image)))), names)
    except PayloadError as e:
        assert str(e)


@given(st.binary(max_size=300), st.sampled_from(list(Compression)), st.integers(0, 2**64 - 1))
def test_any_payload_unpacks_or_is_refused(
    payload: bytes, compression: Compression, promised: int
) -> None:
    try:
        content = unpack(payload, compression, promised)
    except PayloadError:
        return
    assert compression is Compression.NONE or len(content) == promised


@given(st.binary(max_size=2000), st.sampled_from([builders.LZ4, builders.ZSTD]), st.integers(0, 60))
def test_packed_content_unpacks_to_itself(content: bytes, flags: int, other: int) -> None:
    compression = Compression.LZ4 if flags == builders.LZ4 else Compression.ZSTD
    payload = builders.pack(content, flags)
    assert unpack(payload, compression, len(content)) == content
    if other != len(content):
        with pytest.raises(PayloadError):
            unpack(payload, compression, other)


PTX_WORDS = st.sampled_from(
    [
        ".version",
        ".target",
        "9.0",
        "sm_90",
        ".entry",
        ".func",
        ".global",
        ".const",
        ".align",
        "8",
        ".b8",
        "(",
        ")",
        ";",
        "_k",
        "name",
        ".param",
        "{",
        "}",
        "[4]",
        "//",
        "\n",
        " ",
        "\t",
        "\0",
    ]
)


@given(st.lists(PTX_WORDS, max_size=60))
def test_any_text_is_ptx_or_refused(words: list[str]) -> None:
    try:
        parse_ptx(" ".join(words).encode(), NameTable())
    except PayloadError as e:
        assert "not PTX" in str(e)


@given(st.lists(PTX_WORDS | st.sampled_from("\v\f\r._x")).map("".join))
def test_both_searches_find_the_same_entries(text: str) -> None:
    found, expected = (
        [match.span() for match in find_entries(text.encode(), search)]
        for search in (
            load_search(DIRECTIVES, before_space=True),
            search_by(DIRECTIVES, before_space=True),
        )
    )
    assert found == expected


MAGIC_PARTS = st.sampled_from([m[:size] for m in ALL_MAGICS for size in (1, 2, 4, len(m))])


@given(
    st.lists(MAGIC_PARTS | st.binary(max_size=40)).map(b"".join),
    st.sampled_from([REGION_MAGICS, ALL_MAGICS]),
    st.integers(0, 40),
)
def test_both_searches_find_the_same_magic_numbers(
    data: bytes, magics: tuple[bytes, ...], start: int
) -> None:
    def hits(find: Find) -> Iterator[int]:
        at = start - 1
        while (at := find(data, len(data), at + 1)) >= 0:
            yield at

    expected = [at for at in range(start, len(data)) if data.startswith(magics, at)]
    assert list(hits(load_search(magics))) == expected
    assert list(hits(search_by(magics))) == expected


CAPABILITIES = st.builds(ComputeCapability, st.integers(5, 13), st.integers(0, 9))
ARCHS = st.builds(SmArch, st.integers(5, 13), st.integers(0, 9), st.sampled_from(["", "a", "f"]))


@given(ARCHS, CAPABILITIES)
def test_suffix_only_narrows_where_code_runs(arch: SmArch, device: ComputeCapability) -> None:
    plain = SmArch(arch.major, arch.minor)
    family = SmArch(arch.major, arch.minor, "f")
    specific = SmArch(arch.major, arch.minor, "a")
    if cubin_runs_on(specific, device):
        assert cubin_runs_on(family, device)
    if cubin_runs_on(family, device):
        assert cubin_runs_on(plain, device)
    own = ComputeCapability(arch.major, arch.minor)
    assert cubin_runs_on(arch, own)


_KINDS = {
    builders.PTX: ElementKind.PTX,
    builders.CUBIN: ElementKind.CUBIN,
    builders.LTO_IR: ElementKind.LTO_IR,
    3: ElementKind.UNKNOWN,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(_KINDS)), ARCHS), max_size=8), CAPABILITIES)
def test_choice_is_of_one_arch_and_kind_that_fits(
    elements: list[tuple[int, SmArch]], device: ComputeCapability
) -> None:
    region = [
        Element(
            header_offset=0,
            payload=Span(64, 64),
            stored_size=0,
            unpacked_size=0,
            kind=_KINDS[kind],
            arch=arch,
            compression=Compression.NONE,
            kind_number=kind,
        )
        for kind, arch in elements
    ]
    chosen = [region[i] for i in choose_elements(region, device)]
    kinds = {e.kind for e in chosen}
    runs = [e for e in region if e.kind is ElementKind.CUBIN and cubin_runs_on(e.arch, device)]
    assert bool(runs) == (ElementKind.CUBIN in kinds)
    if runs:
        assert kinds == {ElementKind.CUBIN}
    assert ElementKind.UNKNOWN not in kinds
    assert all(len({e.arch for e in chosen if e.kind is kind}) == 1 for kind in kinds)
