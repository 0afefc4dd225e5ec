"""A library's map, asked for its code by block, against the fixtures."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Compression, Cubin, Scope
from tests.support.libraries import BIN, MANIFEST, MULTIARCH, SHARED_OBJECTS, golden_elements


def test_blocks_of_the_golden_library() -> None:
    library_map = read_library(MULTIARCH, Scope())
    golden = golden_elements()
    blocks = list(library_map.iter_code())
    assert [b.header_offset for b in blocks] == [e["header_offset"] for e in golden]
    assert [b.payload.start for b in blocks] == [e["payload_offset"] for e in golden]
    assert [b.payload.end for b in blocks] == [e["end"] for e in golden]
    assert [b.payload.size for b in blocks] == [e["size"] for e in golden]
    assert [b.arch.major * 10 + b.arch.minor for b in blocks] == [e["arch"] for e in golden]
    regions = {region.span.start: region for region in library_map.iter_regions()}
    assert all(b.region is not None and b in regions[b.region].elements for b in blocks)
    assert [type(b.content).__name__.lower() for b in blocks] == [b.kind.value for b in blocks]


def test_a_frame_is_a_cubin_in_no_region() -> None:
    blocks = list(read_library(BIN / "libframes.so", Scope()).iter_code())
    pieces = MANIFEST["files"]["libframes.so"]["pieces"]
    frames = [p for p in pieces if p["piece"].endswith(".cubin.zst") and "elements" in p]
    assert {(b.payload.start, b.payload.size) for b in blocks if b.region is None} == {
        (p["offset"], p["size"]) for p in frames
    }
    for block in blocks:
        if block.region is None:
            assert isinstance(block.content, Cubin)
            assert (block.kind, block.compression) == (ElementKind.CUBIN, Compression.ZSTD)
            assert (block.header_offset, block.stored_size) == (
                block.payload.start,
                block.payload.size,
            )


@pytest.mark.parametrize("path", SHARED_OBJECTS, ids=lambda path: path.name)
def test_every_element_and_frame_is_one_block(path: Path) -> None:
    library_map = read_library(path, Scope(headers_only=True))
    records = list(library_map.iter_code())
    elements = [e for region in library_map.iter_regions() for e in region.elements]
    assert [r for r in records if r.region is not None] == elements
    assert [r for r in records if r.region is None] == list(library_map.iter_frames())
    by_section = [b for section in library_map.sections for b in section.iter_code()]
    assert by_section == records


@pytest.mark.parametrize(
    ("devices", "archs"),
    [
        ((), {}),
        (("7.5",), {"sm_75": 3}),
        (("8.9", "9.0"), {"sm_86": 3, "sm_90": 3}),
        # Newer than any cubin: each region has PTX for it.
        (("12.1",), {"sm_120": 3}),
        (("5.0",), {}),
    ],
)
def test_what_devices_load(devices: tuple[str, ...], archs: dict[str, int]) -> None:
    library_map = read_library(MULTIARCH, Scope(headers_only=True))
    loaded = library_map.loaded_starts(map(ComputeCapability.parse, devices))
    found: dict[str, int] = defaultdict(int)
    for block in library_map.iter_code():
        found[str(block.arch)] += block.payload.start in loaded
    assert {arch: count for arch, count in found.items() if count} == archs


def test_frames_that_a_device_loads_are_those_that_run_on_it() -> None:
    library_map = read_library(BIN / "libframes.so", Scope(headers_only=True))
    loaded = library_map.loaded_starts([ComputeCapability(9, 0)])
    frames = {b.payload.start: str(b.arch) for b in library_map.iter_code() if b.region is None}
    assert sorted(frames.values()) == ["sm_80", "sm_90", "sm_90"]
    assert [frames[start] for start in loaded & frames.keys()] == ["sm_90", "sm_90"]
