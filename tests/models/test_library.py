"""A library's map, asked for its code by block, against the fixtures."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from tests.support.libraries import BIN, MULTIARCH, SHARED_OBJECTS


@pytest.mark.parametrize("path", SHARED_OBJECTS, ids=lambda path: path.name)
def test_every_element_and_frame_is_one_block(path: Path) -> None:
    library_map = read_library(path, Scope(headers_only=True))
    records = list(library_map.iter_code())
    inside = {id(element) for element in library_map.iter_elements()}
    assert [r for r in records if id(r) in inside] == list(library_map.iter_elements())
    assert [r for r in records if id(r) not in inside] == list(library_map.iter_frames())
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
