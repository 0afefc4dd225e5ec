"""Which regions, elements and frames a run's images are."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Cubin, LibraryMap, Scope
from pytest_negativa.models.plan import LocatedLibrary
from pytest_negativa.models.trace import Context, Phase
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN
from tests.support.usages import TEST, library_usage, usage_of


def read(name: str) -> LibraryMap:
    return read_library(BIN / name, Scope(devices=("9.0",)))


def locate(library_map: LibraryMap, images: dict[int, list[str]]) -> LocatedLibrary:
    usage = usage_of(library_usage(library_map, images))
    return locate_library(library_map, usage.libraries[0], usage)


@pytest.fixture
def multiarch() -> LibraryMap:
    return read("libmultiarch.so")


def test_an_image_is_the_region_at_its_offset(multiarch: LibraryMap) -> None:
    starts = [r.span.start for r in multiarch.iter_regions()]
    found = locate(multiarch, {starts[2]: ["k"]})
    [(start, mark)] = found.uses.items()
    assert start == starts[2] and mark.kernels.keys() == {"k"}
    assert found.usage.context_of(mark.first) == found.usage.context_of(mark.kernels["k"]) == TEST
    assert all((found.use_of(b) is mark) is (b.anchor == start) for b in multiarch.iter_code())
    assert found.unmatched == () and found.changed is None


def test_an_image_may_be_the_payload_of_an_element(multiarch: LibraryMap) -> None:
    region = next(iter(multiarch.iter_regions()))
    images = {region.span.start: ["a"], region.elements[3].payload.start: ["b"]}
    mark = locate(multiarch, images).uses[region.span.start]
    assert mark.kernels.keys() == {"a", "b"}


def test_an_image_elsewhere_is_unmatched(multiarch: LibraryMap) -> None:
    start = next(iter(multiarch.iter_regions())).span.start
    found = locate(multiarch, {start + 8: []})
    assert found.unmatched == (
        f"an image at offset {start + 8:#x}, first used in tests/test_a.py::test_b (call)",
    )
    assert not found.uses


def test_frames_are_known_by_their_hash() -> None:
    library_map = read("libframes.so")
    hashes = [f.content.sha256 for f in library_map.iter_frames() if isinstance(f.content, Cubin)]
    first = hashes[0]
    assert first is not None
    usage = usage_of(library_usage(library_map, {}), memory={first: (1, ["k"])})
    found = locate_library(library_map, usage.libraries[0], usage)
    frames = library_map.iter_frames()
    assert [f.span.start in found.uses for f in frames] == [True, False, False]


def test_an_element_that_may_have_been_unpacked_by_the_library(multiarch: LibraryMap) -> None:
    element = next(e for e in multiarch.iter_code() if isinstance(e.content, Cubin))
    names = [k.name for k in multiarch.kernels_of(element.content)]
    for size, kernels, expected in (
        (element.unpacked_size, names[:1], True),
        (element.unpacked_size + 1, names[:1], False),
        (element.unpacked_size, ["another"], False),
        # Nothing was looked up in it: any of its kernels may have been used.
        (element.unpacked_size, [], True),
    ):
        usage = usage_of(library_usage(multiarch, {}), memory={"ff": (size, kernels)})
        found = locate_library(multiarch, usage.libraries[0], usage)
        assert (element.header_offset in found.suspects) is expected


@pytest.mark.planted_fault(
    "A program reads a region of a library from its file and hands the driver the copy in memory.",
    says="memory-image",
)
def test_a_region_that_a_program_read_from_the_file(
    multiarch: LibraryMap, fault: PlantedFault
) -> None:
    region = next(iter(multiarch.iter_regions()))
    header = struct.Struct("<IHHQ")
    data = Path(multiarch.library.path).read_bytes()
    _magic, _version, head, content = header.unpack_from(data, region.span.start)
    cubins = [e for e in region.elements if isinstance(e.content, Cubin)]
    name = multiarch.kernels_of(cubins[0].content)[0].name
    usage = usage_of(library_usage(multiarch, {}), memory={"ff": (head + content, [name])})
    found = locate_library(multiarch, usage.libraries[0], usage)
    assert found.suspects.keys() == {e.header_offset for e in region.elements}
    decisions = plan_library(found, (ComputeCapability(9, 0),), KeepPolicy()).decisions
    fault.check(" ".join(d.reason for d in decisions))


@pytest.mark.parametrize(
    ("context", "text"),
    [
        (Context(phase=Phase.CALL, nodeid="a.py::b"), "a.py::b (call)"),
        (Context(phase=Phase.FIXTURE, nodeid="a.py", detail="model"), "a.py (fixture)"),
        (Context(phase=Phase.FIXTURE, detail="model"), "model"),
        (Context(phase=Phase.IMPORT), "import"),
    ],
)
def test_contexts_for_people(context: Context, text: str) -> None:
    assert str(context) == text
