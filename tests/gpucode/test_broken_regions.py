"""Damage inside GPU code: a problem with its offset or one unreadable element, the rest is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lz4.block
import pytest
import zstandard

from pytest_negativa.arch import ComputeCapability, ElementKind, choose_elements
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.payload import MAX_UNPACKED_SIZE, PayloadError, unpack
from pytest_negativa.models.library import Compression, Cubin, LibraryMap, Scope
from tests.support.builders import (
    LINUX_64,
    LZ4,
    ZSTD,
    Block,
    CubinSpec,
    ElementSpec,
    HostSection,
    build_cubin,
    build_element,
    build_frame,
    build_host,
    build_region,
    fatbin_section,
    pack,
    padded,
    patched,
    zstd_frame,
)
from tests.support.invariants import check_map
from tests.support.libraries import BIN

IMAGE = build_cubin(CubinSpec(kernels={"kernel": bytes(range(64))})).data
SOUND = ElementSpec(content=IMAGE, flags=LINUX_64 | ZSTD)
SOUND_REGION = build_region([SOUND])

ReadSections = Callable[..., tuple[LibraryMap, tuple[int, ...]]]


@pytest.fixture
def read_sections(tmp_path: Path) -> ReadSections:
    """Builds a library of some sections and reads it; also tells where the sections went."""

    def read(*sections: HostSection) -> tuple[LibraryMap, tuple[int, ...]]:
        host = build_host(sections)
        library = tmp_path / "lib.so"
        library.write_bytes(host.data)
        library_map = read_library(library, Scope())
        check_map(library_map)
        return library_map, host.offsets

    return read


def element_with(**changes: int | bytes) -> bytes:
    spec = ElementSpec(content=IMAGE, flags=LINUX_64 | ZSTD, **changes)  # type: ignore[arg-type]
    return build_element(spec)


BROKEN_REGIONS = [
    pytest.param(build_region([SOUND], version=2), 4, "region version 2", id="version"),
    pytest.param(
        build_region([SOUND], header_size=24), 4, "with a header of 24 bytes", id="header-size"
    ),
    pytest.param(build_region([SOUND], size=1 << 20), 8, "region ends at", id="size-past-end"),
    pytest.param(build_region([SOUND], size=2**64 - 1), 8, "region ends at", id="size-2-to-64"),
    pytest.param(
        build_region([element_with(version=0x0102)]), 18, "element header version 0x102", id="1.2"
    ),
    pytest.param(
        build_region([element_with(header_size=63)]), 20, "header of 63 bytes", id="header-63"
    ),
    pytest.param(
        build_region([element_with(header_size=2**32 - 1)]),
        20,
        "element header of 4294967295 bytes",
        id="header-huge",
    ),
    pytest.param(
        build_region([element_with(size=2**64 - 8)]), 24, "element payload ends at", id="payload"
    ),
    pytest.param(
        build_region([build_element(SOUND)[:40]]),
        16,
        "element header leaves its region",
        id="half-a-header",
    ),
    pytest.param(
        build_region([SOUND, bytes(63)]),
        16 + len(build_element(SOUND)),
        "element header leaves its region",
        id="rest-one-byte-too-small",
    ),
    pytest.param(
        build_region([SOUND], size=len(build_element(SOUND)) - 1),
        24,
        "element payload ends at",
        id="region-one-byte-short",
    ),
]


@pytest.mark.parametrize(("region", "offset", "text"), BROKEN_REGIONS)
def test_broken_region_is_a_problem_and_the_next_one_is_read(
    read_sections: ReadSections, region: bytes, offset: int, text: str
) -> None:
    library_map, (start,) = read_sections(fatbin_section(SOUND_REGION, region, SOUND_REGION))
    first = padded(SOUND_REGION)
    found = [r.span.start for r in library_map.iter_regions()]
    assert found == [start, start + len(first) + len(padded(region))]
    problem = library_map.problems[0]
    assert problem.startswith(f"at offset {start + len(first) + offset:#x}: .nv_fatbin: ")
    assert text in problem
    # What stands where the region would be is reported too, up to the next one.
    assert any("not understood" in p for p in library_map.problems)


@pytest.mark.parametrize(("region", "offset", "text"), BROKEN_REGIONS)
def test_broken_region_among_other_data_is_a_false_hit(
    read_sections: ReadSections, region: bytes, offset: int, text: str
) -> None:
    library_map, (start,) = read_sections(fatbin_section(region, SOUND_REGION, name=".rodata"))
    assert [r.span.start for r in library_map.iter_regions()] == [start + len(padded(region))]
    assert library_map.problems == ()


def test_bytes_around_regions_are_reported(read_sections: ReadSections) -> None:
    data = b"\0\0\x01\0garbage." + padded(SOUND_REGION, 4) + bytes(64) + b"x" + bytes(7)
    library_map, (start,) = read_sections(HostSection(name=".nv_fatbin", data=data))
    end = start + len(data)
    assert library_map.problems == (
        f"at offset {start + 2:#x}: .nv_fatbin: 10 bytes before the next region are not understood",
        f"at offset {end - 8:#x}: .nv_fatbin: 8 bytes at its end are not understood",
    )
    assert [r.span.start - start for r in library_map.iter_regions()] == [12]


@pytest.mark.parametrize("size", [1, 3, 4, 15])
def test_section_that_ends_in_a_region_header(read_sections: ReadSections, size: int) -> None:
    data = padded(SOUND_REGION) + SOUND_REGION[:size]
    library_map, _ = read_sections(HostSection(name=".nv_fatbin", data=data))
    assert len(list(library_map.iter_regions())) == 1
    assert library_map.problems


def test_problems_have_an_end(read_sections: ReadSections) -> None:
    # Each is a region of its own that is not understood, far enough apart for the budget.
    broken = padded(build_region([bytes(120)], version=2))
    library_map, _ = read_sections(HostSection(name=".nv_fatbin", data=broken * 4000))
    assert len(library_map.problems) == 1001
    assert library_map.problems[-1].endswith("on: further problems are not listed")


def bad_zstd() -> bytes:
    frame = bytearray(zstd_frame(IMAGE, checksum=True))
    frame[-1] ^= 0xFF
    return bytes(frame)


UNREADABLE = [
    pytest.param(ElementSpec(content=IMAGE, kind=3), "element kind 3 is not known", id="kind-3"),
    pytest.param(
        ElementSpec(content=IMAGE, kind=0xFFFF), "element kind 65535 is not known", id="kind-65535"
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LINUX_64 | 0x8), "flags 0x8 are not known", id="opencl"
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LINUX_64 | 1 << 63),
        "flags 0x8000000000000000 are not known",
        id="flag-2-to-63",
    ),
    pytest.param(
        ElementSpec(content=build_cubin(CubinSpec(kernels={"kernel": bytes(64)}, abi=9)).data),
        "cubin: ABI version 9, expected 7 or 8",
        id="abi-9",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LINUX_64 | LZ4 | ZSTD, payload=pack(IMAGE, ZSTD)),
        "both LZ4 and zstd",
        id="two-compressions",
    ),
    pytest.param(
        ElementSpec(
            content=IMAGE,
            flags=ZSTD,
            payload=padded(zstd_frame(IMAGE)),
            compressed_size=len(padded(zstd_frame(IMAGE))) + 1,
        ),
        "exceeds the payload's",
        id="compressed-size-one-byte-past-payload",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, compressed_size=0), "zstd", id="no-compressed-bytes"
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, compressed_size=0), "LZ4|lz4", id="no-lz4-bytes"
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, unpacked_size=400 << 30),
        "promises 429,496,729,600 bytes unpacked of .*, more than the limit",
        id="promises-400-GiB",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, unpacked_size=2**64 - 1),
        "more than the limit",
        id="promises-2-to-64",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, unpacked_size=len(IMAGE) + 1),
        f"zstd frame states {len(IMAGE):,} bytes, promised were {len(IMAGE) + 1:,}",
        id="frame-states-less",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, unpacked_size=0),
        "promised were 0",
        id="promises-nothing",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, unpacked_size=len(IMAGE) + 1),
        "unpacks to|damaged lz4",
        id="lz4-promises-more",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, unpacked_size=len(IMAGE) - 1),
        "damaged lz4 payload",
        id="lz4-promises-less",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, unpacked_size=256 * len(IMAGE)),
        "of LZ4 cannot hold",
        id="lz4-promises-the-impossible",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, payload=bad_zstd()),
        "damaged zstd payload",
        id="zstd-checksum",
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=ZSTD, payload=b"\xff" * 64), "zstd", id="zstd-garbage"
    ),
    pytest.param(
        ElementSpec(content=IMAGE, flags=LZ4, payload=b"\xff" * 64), "lz4", id="lz4-garbage"
    ),
    pytest.param(
        ElementSpec(
            content=IMAGE,
            flags=ZSTD,
            payload=build_frame([Block(3, IMAGE)], len(IMAGE)),
        ),
        "damaged zstd payload",
        id="reserved-block",
    ),
    pytest.param(
        ElementSpec(
            content=IMAGE,
            flags=ZSTD,
            payload=build_frame([Block(0, IMAGE + IMAGE)], len(IMAGE)),
        ),
        "zstd",
        id="frame-holds-more-than-it-states",
    ),
    pytest.param(
        ElementSpec(
            content=IMAGE,
            flags=ZSTD,
            payload=build_frame([Block(0, IMAGE[:-8])], len(IMAGE)),
        ),
        "zstd|unpacks to",
        id="frame-holds-less-than-it-states",
    ),
    pytest.param(ElementSpec(content=b"not a cubin at all, but text"), "not a cubin", id="text"),
]


@pytest.mark.parametrize(("spec", "pattern"), UNREADABLE)
def test_unreadable_element_is_kept_and_its_neighbours_are_read(
    read_sections: ReadSections, spec: ElementSpec, pattern: str
) -> None:
    library_map, _ = read_sections(fatbin_section(build_region([SOUND, spec, SOUND])))
    before, element, after = library_map.iter_code()
    assert element.content is None
    assert element.unreadable is not None
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(element.unreadable)
    for neighbour in (before, after):
        assert isinstance(neighbour.content, Cubin)
        assert [library_map.names[k.name] for k in neighbour.content.kernels] == ["kernel"]
    assert (element.kind is ElementKind.UNKNOWN) == ("not known" in element.unreadable)
    assert element.kind_number == spec.kind


@pytest.mark.parametrize(
    ("changes", "identifier"),
    [
        ({}, "a.cu"),
        ({"name_length": 2}, "a."),
        ({"name_length": 2**32 - 1}, "a.cu"),
        ({"name_offset": 2**32 - 1}, None),
        ({"name_offset": 2**32 - 1, "name_length": 2**32 - 1}, None),
    ],
)
def test_identifier_that_leaves_its_header(
    read_sections: ReadSections, changes: dict[str, int], identifier: str | None
) -> None:
    spec = ElementSpec(content=IMAGE, identifier=b"a.cu", **changes)  # type: ignore[arg-type]
    library_map, _ = read_sections(fatbin_section(build_region([spec])))
    (element,) = library_map.iter_code()
    assert element.identifier == identifier
    assert element.unreadable is None


def test_identifier_of_other_bytes_than_text(read_sections: ReadSections) -> None:
    spec = ElementSpec(content=IMAGE, identifier=b"\xff\xfe.cu")
    library_map, _ = read_sections(fatbin_section(build_region([spec])))
    assert [e.identifier for e in library_map.iter_code()] == ["\\xff\\xfe.cu"]


@pytest.mark.parametrize("name", [".nv_fatbin", "__nv_relfatbin", ".rodata", ".cask_resource"])
def test_section_cut_anywhere(tmp_path: Path, name: str) -> None:
    """Every region before the cut is found, nothing of the one that is cut."""
    data = (BIN / "libmultiarch.so").read_bytes()[8320:31840]
    ends = [15624 - 8320, 23264 - 8320, 31840 - 8320]
    library = tmp_path / "lib.so"
    boundaries = {16, 15, 17, 16 + 63, 16 + 64, *ends, *(e + 1 for e in ends[:2]), ends[-1] - 1}
    for cut in sorted({*range(0, len(data), 97), *boundaries}):
        host = build_host([HostSection(name=name, data=data[:cut])])
        library.write_bytes(host.data)
        library_map = read_library(library, Scope(headers_only=cut % 5 != 0))
        check_map(library_map)
        complete = [end for end in ends if end <= cut]
        (start,) = host.offsets
        assert [r.span.end - start for r in library_map.iter_regions()] == complete, cut
        understood = cut in (0, *ends) or not any(data[max((0, *complete)) : cut])
        strict = name in (".nv_fatbin", "__nv_relfatbin")
        assert bool(library_map.problems) == (strict and not understood), cut


@pytest.mark.parametrize("flags", [LZ4, ZSTD])
def test_payload_cut_anywhere(flags: int) -> None:
    content = (BIN / "callgraph.sm_90.cubin").read_bytes()
    payload = pack(content, flags)
    compression = Compression.LZ4 if flags == LZ4 else Compression.ZSTD
    assert unpack(payload, compression, len(content)) == content
    for cut in (*range(0, len(payload), 97), len(payload) - 1):
        with pytest.raises(PayloadError):
            unpack(payload[:cut], compression, len(content))


@pytest.mark.parametrize("promised", [0, 1, 100, MAX_UNPACKED_SIZE, MAX_UNPACKED_SIZE + 1])
def test_frame_that_does_not_state_its_size(promised: int) -> None:
    content = bytes(range(100))
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    if promised == 100:
        assert unpack(frame, Compression.ZSTD, promised) == content
    else:
        with pytest.raises(PayloadError):
            unpack(frame, Compression.ZSTD, promised)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_limit_of_what_is_unpacked(compression: Compression) -> None:
    with pytest.raises(PayloadError, match="more than the limit of 536,870,912"):
        unpack(CUBIN_FRAME, compression, MAX_UNPACKED_SIZE + 1)


def test_empty_content() -> None:
    assert unpack(zstd_frame(b""), Compression.ZSTD, 0) == b""
    assert unpack(lz4.block.compress(b"", store_size=False), Compression.LZ4, 0) == b""
    assert unpack(b"", Compression.NONE, 0) == b""


CUBIN_FRAME = zstd_frame(IMAGE, checksum=True)
NO_FRAME = [
    pytest.param(zstd_frame(b"text " * 100), id="text"),
    pytest.param(CUBIN_FRAME[:9], id="frame-header"),
    pytest.param(CUBIN_FRAME[:4], id="magic"),
    pytest.param(CUBIN_FRAME[:4] + b"\xff" * 60, id="magic-and-garbage"),
    pytest.param(build_frame([Block(0, IMAGE)], 600 << 20), id="states-more-than-the-limit"),
    pytest.param(build_frame([Block(0, IMAGE)], 2**64 - 1), id="states-2-to-64"),
    pytest.param(build_frame([Block(0, IMAGE)], 10), id="states-less-than-an-elf-header"),
    pytest.param(build_frame([Block(0, IMAGE)], len(IMAGE), ended=False), id="no-last-block"),
    pytest.param(build_frame([Block(3, IMAGE)], len(IMAGE)), id="reserved-block"),
    pytest.param(build_frame([Block(0, IMAGE, 129 << 10)], len(IMAGE)), id="block-too-large"),
    pytest.param(build_frame([Block(2, IMAGE)], len(IMAGE)), id="damaged-first-block"),
    pytest.param(build_frame([Block(0, b"")], len(IMAGE)), id="empty"),
    pytest.param(build_frame([Block(1, b"\x7f", 1000)], 1000), id="rle"),
    pytest.param(
        zstandard.ZstdCompressor(write_content_size=False).compress(IMAGE), id="no-content-size"
    ),
]


@pytest.mark.parametrize("frame", NO_FRAME)
def test_frame_that_holds_no_cubin(read_sections: ReadSections, frame: bytes) -> None:
    data = padded(frame) + padded(CUBIN_FRAME)
    library_map, (start,) = read_sections(HostSection(name=".ldata", data=data))
    # A block that isn't compressed holds a plain cubin, whatever the frame is.
    zstd = Compression.ZSTD
    spans = [f.span for f in library_map.iter_frames() if f.compression is zstd]
    # A cut frame may swallow what follows it, and then nothing in it is a cubin's.
    assert [s.start - start for s in spans] == [len(padded(frame))]
    assert spans[0].size == len(CUBIN_FRAME)


@pytest.mark.parametrize(
    ("frame", "unpacked_size", "pattern"),
    [
        pytest.param(patched(CUBIN_FRAME, len(CUBIN_FRAME) - 4, "I", 0), None, "zstd", id="sum"),
        pytest.param(
            build_frame([Block(0, IMAGE[:100]), Block(1, b"\0", 50)], len(IMAGE)),
            None,
            "zstd|unpacks to",
            id="holds-less",
        ),
        pytest.param(
            build_frame([Block(0, IMAGE[:100]), Block(2, b"\xff" * 40)], len(IMAGE)),
            None,
            "damaged zstd",
            id="second-block",
        ),
        pytest.param(
            build_frame([Block(0, IMAGE[:64]), Block(1, b"\0", 5000)], 5064),
            5064,
            "cubin",
            id="half-a-cubin",
        ),
        pytest.param(
            zstd_frame(patched(IMAGE, 8, "B", 9)), None, "ABI version 9, expected", id="abi-9"
        ),
    ],
)
def test_unreadable_frame_is_kept(
    read_sections: ReadSections, frame: bytes, unpacked_size: int | None, pattern: str
) -> None:
    data = padded(frame) + padded(CUBIN_FRAME)
    library_map, _ = read_sections(HostSection(name=".ldata", data=data))
    broken, sound = library_map.iter_frames()
    assert broken.span.size == len(frame)
    assert broken.unpacked_size == (unpacked_size or len(IMAGE))
    assert broken.unreadable is not None
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(broken.unreadable)
    assert sound.content is not None


def test_frame_of_another_abi_is_kept_whatever_is_read(tmp_path: Path) -> None:
    """Its arch stands where only a known ABI has it, so no arch makes it one to pass over."""
    frame = zstd_frame(patched(IMAGE, 8, "B", 9))
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([HostSection(name=".ldata", data=padded(frame))]).data)
    for scope in (Scope(headers_only=True), Scope(devices=("7.5",)), Scope()):
        (found,) = read_library(library, scope).iter_frames()
        assert found.unreadable == "cubin: ABI version 9, expected 7 or 8"


def test_element_with_unknown_flag_stands_in_for_no_other(read_sections: ReadSections) -> None:
    """The flag may say that no known device takes it; then the driver takes the other one."""
    odd = ElementSpec(content=IMAGE, arch=90, flags=LINUX_64 | 0x400000)
    other = ElementSpec(content=IMAGE, arch=90, flags=LINUX_64)
    older = ElementSpec(content=IMAGE, arch=80, flags=LINUX_64)
    for specs, chosen in (([odd, other], (1,)), ([odd, older], ())):
        library_map, _ = read_sections(fatbin_section(build_region(specs)))
        (region,) = library_map.iter_regions()
        assert choose_elements(region.elements, ComputeCapability(9, 0)) == chosen


def test_frames_are_not_sought_where_they_cannot_be(read_sections: ReadSections) -> None:
    for section in (
        HostSection(name=".text", data=CUBIN_FRAME, flags=6),
        HostSection(name=".nv_fatbin", data=CUBIN_FRAME),
        HostSection(name=".debug_info", data=CUBIN_FRAME, flags=0),
    ):
        library_map, _ = read_sections(section)
        assert library_map.sections == ()


@pytest.mark.parametrize("missing", [1, 3, 4, 5])
def test_frame_that_leaves_its_section(read_sections: ReadSections, missing: int) -> None:
    # The bytes that are missing stand right behind the section, in the next one.
    cut = len(CUBIN_FRAME) - missing
    library_map, _ = read_sections(
        HostSection(name=".ldata", data=CUBIN_FRAME[:cut]),
        HostSection(name=".data", data=CUBIN_FRAME[cut:] + bytes(64), alignment=1),
    )
    assert library_map.sections == ()


def test_overlapping_chains_end_soon(tmp_path: Path) -> None:
    """Region headers inside payloads, each the start of a chain through all that follows."""
    count = 13_000
    size = 16 + count * 80 + 8
    chain = bytearray(build_region([], size=size - 16))
    for number in range(1, count + 1):
        left = size - (16 + number * 80)
        inner = build_region([], size=left)
        chain += build_element(ElementSpec(content=inner))
    chain += b"\xff" * 8
    library = tmp_path / "lib.so"
    library.write_bytes(build_host([HostSection(name=".rodata", data=bytes(chain))]).data)
    with pytest.raises(FormatError, match="too many overlapping headers") as caught:
        read_library(library, Scope())
    assert caught.value.offset is not None


def test_many_false_hits_end_soon(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    for magic in (SOUND_REGION[:4], CUBIN_FRAME[:4]):
        library.write_bytes(build_host([HostSection(name=".rodata", data=magic * 500_000)]).data)
        with pytest.raises(FormatError, match="too many overlapping"):
            read_library(library, Scope())


@pytest.mark.parametrize("gap", range(248, 262))
@pytest.mark.parametrize("name", [".nv_fatbin", ".ldata"])
def test_search_windows_miss_nothing_at_their_edges(
    read_sections: ReadSections, gap: int, name: str
) -> None:
    data = bytes(gap) + SOUND_REGION + bytes(gap) + SOUND_REGION + bytes(4096 + gap) + SOUND_REGION
    library_map, (start,) = read_sections(HostSection(name=name, data=data))
    size = len(SOUND_REGION)
    assert [r.span.start - start for r in library_map.iter_regions()] == [
        gap,
        2 * gap + size,
        3 * gap + 2 * size + 4096,
    ]
    assert library_map.problems == ()
