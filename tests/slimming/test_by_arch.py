"""Slimming without trace or lock: what devices of some archs can load stays."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pytest_negativa.arch import ComputeCapability, ElementKind, choose_elements
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.summary import loadable_code
from pytest_negativa.models.library import Element, LibraryMap, Region, Scope, Section
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.planning.decide import plan_for_devices
from pytest_negativa.reporting.slimming import render_rows
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from tests.support.builders import (
    PTX,
    CubinSpec,
    ElementSpec,
    build_cubin,
    build_ptx,
    build_region,
)
from tests.support.commands import inspect
from tests.support.compacting import SHAPES, build, needs_compiler, read
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, MULTIARCH
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import digests, wrong_files

H200, A100, RTX = ComputeCapability(9, 0), ComputeCapability(8, 0), ComputeCapability(8, 9)
FAST = SlimOptions()
DRY = SlimOptions(dry_run=True)


def headers(path: Path) -> LibraryMap:
    return read_library(path, Scope(headers_only=True))


def kept(plan: LibraryPlan, region: Region) -> list[Element]:
    starts = {d.start for d in plan.decisions if d.kept}
    return [element for element in region.elements if element.payload.start in starts]


def plan(library_map: LibraryMap, *devices: ComputeCapability, ptx: bool = False) -> LibraryPlan:
    return plan_for_devices(library_map, devices, keep_ptx=ptx)


def archs(elements: list[Element]) -> list[str]:
    return [f"{e.kind.value} {e.arch}" for e in elements]


def test_the_drivers_choice_of_every_region_stays() -> None:
    library_map = headers(MULTIARCH)
    for devices in ((H200,), (A100,), (H200, A100), (RTX,)):
        made = plan(library_map, *devices)
        for region in library_map.iter_regions():
            chosen = {i for d in devices for i in choose_elements(region.elements, d)}
            assert kept(made, region) == [region.elements[i] for i in sorted(chosen)]


def test_each_element_has_a_decision() -> None:
    for path in BIN.glob("*.so"):
        library_map = headers(path)
        spans = [(e.payload.start, e.payload.end) for e in library_map.iter_code()]
        made = plan(library_map, H200)
        assert [(d.start, d.end) for d in made.decisions] == sorted(spans)


def test_ptx_stays_if_asked_for() -> None:
    library_map = headers(MULTIARCH)
    ptx = [e for e in library_map.iter_code() if e.kind is ElementKind.PTX]
    assert ptx
    without, with_ptx = plan(library_map, H200), plan(library_map, H200, ptx=True)
    starts = {d.start for d in with_ptx.decisions if d.kept}
    assert {e.payload.start for e in ptx} <= starts
    assert {d.start for d in without.decisions if d.kept} < starts


def test_ptx_that_a_device_must_compile_stays() -> None:
    library_map = headers(BIN / "libptx_only.so")
    assert any(d.kept for d in plan(library_map, ComputeCapability(12, 0)).decisions)


def test_frames_of_other_archs_go() -> None:
    library_map = headers(BIN / "libframes.so")
    frames = list(library_map.iter_frames())
    assert frames
    by_start = {d.start: d.kept for d in plan(library_map, A100).decisions}
    expected = [f.arch.major == 8 for f in frames]
    assert [by_start[f.span.start] for f in frames] == expected


def test_what_cannot_be_read_stays() -> None:
    library_map = headers(MULTIARCH)
    [section] = library_map.sections
    region = section.regions[0]
    broken = msgspec.structs.replace(region.elements[0], unreadable="damaged")
    unknown = msgspec.structs.replace(region.elements[1], kind=ElementKind.UNKNOWN)
    elements = (broken, unknown, *region.elements[2:])
    changed = msgspec.structs.replace(region, elements=elements)
    library_map = msgspec.structs.replace(
        library_map, sections=(msgspec.structs.replace(section, regions=(changed,)),)
    )
    starts = {d.start for d in plan(library_map, H200).decisions if d.kept}
    assert {broken.payload.start, unknown.payload.start} <= starts


def in_section(library_map: LibraryMap, name: str) -> LibraryMap:
    sections: tuple[Section, ...] = tuple(
        msgspec.structs.replace(section, name=name) for section in library_map.sections
    )
    return msgspec.structs.replace(library_map, sections=sections)


@pytest.mark.parametrize("name", ["__nv_relfatbin", ".ldata", ".cask_resource"])
def test_where_the_library_may_choose_itself_more_stays(name: str) -> None:
    library_map = headers(BIN / "libsuffix.so")
    elsewhere = in_section(library_map, name)
    for region in library_map.iter_regions():
        by_driver = set(archs(kept(plan(library_map, H200), region)))
        by_library = set(archs(kept(plan(elsewhere, H200), region)))
        assert by_driver < by_library
        assert {"cubin sm_90", "cubin sm_90a"} <= by_library
        assert not any("sm_8" in one or "sm_10" in one for one in by_library if "cubin" in one)


def test_relocatable_code_for_the_device_stays() -> None:
    library_map = headers(BIN / "librdc_unlinked.so")
    names = {section.name for section in library_map.sections}
    assert "__nv_relfatbin" in names
    made = plan(library_map, H200)
    for region in library_map.iter_regions():
        fitting = [e for e in region.elements if e.arch.major == 9]
        assert all(element in kept(made, region) for element in fitting)


def relocatable_library(tmp_path: Path) -> Path:
    """Linked for sm_80 alone, with relocatable PTX from which a driver could link for others."""
    kernels = {"fill": bytes(range(256)) * 512}
    cubin, object_file = (
        ElementSpec(
            content=build_cubin(CubinSpec(arch=80, kernels=kernels, relocatable=is_object)).data,
            arch=80,
        )
        for is_object in (False, True)
    )
    ptx = ElementSpec(content=build_ptx(target="sm_80"), kind=PTX, arch=80)
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "relocatable.bin").write_bytes(build_region([object_file, ptx]))
    section = '.section __nv_relfatbin, "a", @progbits\n.incbin "relocatable.bin"\n'
    return build(folder, fatbin=build_region([cubin]), ldata=b"", extra=section)


@needs_compiler
def test_a_link_by_the_driver(tmp_path: Path) -> None:
    """What it needs stays, and gates count on it, before and after."""
    library = relocatable_library(tmp_path)
    library_map = headers(library)
    for devices, wanted in (
        ((H200,), ["cubin sm_80", "ptx sm_80"]),
        ((H200, A100), ["cubin sm_80", "cubin sm_80", "ptx sm_80"]),
        ((ComputeCapability(7, 5),), []),
    ):
        made = plan(library_map, *devices)
        found = [a for region in library_map.iter_regions() for a in archs(kept(made, region))]
        assert sorted(found) == wanted
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(library, site)
    target = site / library.name
    dead = ["--arch=90", "--max-dead=0"]
    assert inspect(target, "--require-arch=80").exit_code == 0
    before = inspect(target, "--require-arch=90")
    assert inspect(target, *dead).exit_code == 1
    [row] = slim_trees(SlimRequest(paths=(site,), devices=(H200,), options=FAST)).rows
    assert row.status is SlimStatus.SLIMMED
    after = inspect(target, "--require-arch=90")
    assert before.exit_code == after.exit_code == 0
    assert before.stdout == after.stdout and "ptx sm_80" in after.stdout
    # Without the linked region nothing names the relocatable code: as slim left it once.
    gone = msgspec.structs.replace(library_map, sections=library_map.sections[1:])
    assert [s.name for s in gone.sections] == ["__nv_relfatbin"]
    assert loadable_code(gone, H200).is_missing
    region = msgspec.structs.replace(library_map.sections[0].regions[0], elements=())
    empty = msgspec.structs.replace(library_map.sections[0], regions=(region,))
    there = msgspec.structs.replace(library_map, sections=(empty, *gone.sections))
    assert loadable_code(there, H200) == loadable_code(library_map, H200)
    assert inspect(target, *dead).exit_code == 0


@needs_compiler
class TestSlimming:
    """Elements of the libraries are for sm_90, sm_91 and so on, by their place in the region."""

    def test_a_site(self, site: Made) -> None:
        before = digests(site.folder)
        request = SlimRequest(paths=(site.folder,), devices=(H200,), options=FAST)
        rows = {row.path: row for row in slim_trees(request).rows}
        assert set(rows) == {ONE, TWO}
        assert {row.status for row in rows.values()} == {SlimStatus.SLIMMED}
        assert rows[ONE].after < rows[ONE].before
        assert wrong_files(site.folder) == []
        changed = {n for n, d in digests(site.folder).items() if before.get(n) != d}
        assert HOST not in changed

    def test_what_is_left_is_what_the_device_loads(self, site: Made) -> None:
        elements = sum(map(len, SHAPES)) * 2
        assert len(list(read(site.one).iter_code())) == elements
        slim_trees(SlimRequest(paths=(site.one,), devices=(H200,), options=FAST))
        left = [e for e in read(site.one).iter_code() if e.kind is not ElementKind.UNKNOWN]
        assert {str(e.arch) for e in left} == {"sm_90"}
        assert len(left) == 2 * len(SHAPES)

    def test_second_run_does_nothing(self, site: Made) -> None:
        request = SlimRequest(
            paths=(site.folder,), devices=(H200,), strip_others=True, options=FAST
        )
        assert not slim_trees(request).failed
        before = digests(site.folder)
        rows = slim_trees(request).rows
        assert {row.status for row in rows} == {SlimStatus.ALREADY, SlimStatus.LEFT}
        assert digests(site.folder) == before

    def test_stripping_the_others_later(self, site: Made) -> None:
        plain = SlimRequest(paths=(site.folder,), devices=(H200,), options=FAST)
        assert not slim_trees(plain).failed
        report = slim_trees(replace(plain, strip_others=True))
        rows = {row.path: row.status for row in report.rows}
        assert rows[ONE] is SlimStatus.ALREADY
        assert rows[HOST] is SlimStatus.SLIMMED
        assert not report.failed

    def test_other_archs_later(self, site: Made) -> None:
        plain = SlimRequest(paths=(site.folder,), devices=(H200,), options=FAST)
        assert not slim_trees(plain).failed
        before = site.one.read_bytes()
        rows = {row.path: row for row in slim_trees(replace(plain, devices=(H200, A100))).rows}
        assert rows[ONE].status is SlimStatus.FAILED
        assert site.one.read_bytes() == before

    def test_stripping_the_others_is_all_others(self, site: Made) -> None:
        request = SlimRequest(
            paths=(site.folder,), devices=(H200,), strip_others=True, options=FAST
        )
        rows = {row.path: row.status for row in slim_trees(request).rows}
        assert rows[HOST] is rows["other/libother.so"] is SlimStatus.SLIMMED
        assert wrong_files(site.folder) == []

    def test_damaged_library_is_left(self, site: Made) -> None:
        site.one.write_bytes(site.one.read_bytes()[:5000])
        request = SlimRequest(paths=(site.folder,), devices=(H200,), options=FAST)
        rows = {row.path: row for row in slim_trees(request).rows}
        assert rows[ONE].status in (SlimStatus.LEFT, SlimStatus.FAILED)
        assert rows[TWO].status is SlimStatus.SLIMMED
        assert site.one.stat().st_size == 5000

    @pytest.mark.planted_fault(
        "A library has no code for any GPU that --arch names, and slim empties it.",
        says="would be slimmed, keeps no code for sm_120",
    )
    def test_library_that_becomes_useless_comes_first(
        self, site: Made, fault: PlantedFault
    ) -> None:
        shutil.copy(BIN / "libmultiarch.so", site.folder / "gpu/libsmall.so")
        devices = (ComputeCapability(12, 0),)
        request = SlimRequest(paths=(site.folder,), devices=devices, options=DRY)
        rows = slim_trees(request).rows
        assert {row.path for row in rows if row.useless} == {ONE, TWO}
        larger = msgspec.structs.replace(rows[0], path="z", before=1 << 40, useless=False)
        shown = render_rows((larger, *rows), "nothing")
        fault.check(shown)
        assert shown.index(ONE) < shown.index("z  ")
