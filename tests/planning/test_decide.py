"""Locate and plan: what is kept and what is unused, on libraries compiled by nvcc."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import LibraryMap, Region, Scope
from pytest_negativa.models.plan import KeepReason, KernelUse, LibraryPlan, UnusedReason
from pytest_negativa.models.spans import PAGE_SIZE, Span, around
from pytest_negativa.models.trace import EAGER_LOADING, Usage, UsageWarning
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.settings.globs import GlobSet
from pytest_negativa.storage.results import negativa_ml_spans
from tests.support.libraries import BIN, QUICKSTART_LIBRARY
from tests.support.usages import TEST, library_usage, usage_of

H200 = ComputeCapability(9, 0)
WRONG = UnusedReason.WRONG_ARCH.value
NO_KERNEL = UnusedReason.NO_USED_KERNEL.value


def read(name: str, *devices: str) -> LibraryMap:
    return read_library(BIN / name, Scope(devices=devices or ("9.0",)))


def regions(library_map: LibraryMap) -> tuple[Region, ...]:
    return tuple(library_map.iter_regions())


def plan(
    library_map: LibraryMap,
    usage: Usage,
    policy: KeepPolicy | None = None,
    *,
    devices: Sequence[ComputeCapability] = (H200,),
    incomplete: str | None = None,
    changed: str | None = None,
) -> LibraryPlan:
    located = locate_library(library_map, usage.libraries[0], usage, changed)
    return plan_library(located, devices, policy or KeepPolicy(), incomplete)


def reasons(library_plan: LibraryPlan) -> Counter[str]:
    return Counter(d.reason for d in library_plan.decisions)


def kernels_for(library_map: LibraryMap, region: Region, arch: str = "sm_90") -> tuple[str, ...]:
    return tuple(
        kernel.name
        for element in region.elements
        if str(element.arch) == arch and element.kind is ElementKind.CUBIN
        for kernel in library_map.kernels_of(element.content)
    )


@pytest.fixture
def multiarch() -> LibraryMap:
    """Three regions, each with sm_75, 80, 86, 90, 100, 120 and PTX of 120."""
    return read("libmultiarch.so")


def test_one_region_used(multiarch: LibraryMap) -> None:
    region = regions(multiarch)[1]
    names = kernels_for(multiarch, region)
    used = library_usage(multiarch, {region.span.start: names[:1]})

    found = plan(multiarch, usage_of(used))

    assert reasons(found) == {WRONG: 18, NO_KERNEL: 2, KeepReason.LOADED.value: 1}
    [kept] = [d for d in found.decisions if d.kept]
    [element] = [e for e in region.elements if str(e.arch) == "sm_90"]
    assert (kept.start, kept.end) == (element.payload.start, element.payload.end)
    assert kept.detail == "tests/test_a.py::test_b (call)"
    assert found.used_kernels == (KernelUse(names[0], TEST),)
    assert len(found.unused_kernels) == 5
    assert list(found.unused_kernels) == sorted(found.unused_kernels)
    assert names[0] not in found.unused_kernels


def test_all_kernels_of_an_image_without_a_look_up_are_used(multiarch: LibraryMap) -> None:
    region = regions(multiarch)[1]
    used = library_usage(multiarch, {region.span.start: []})
    found = plan(multiarch, usage_of(used)).used_kernels
    assert {kernel.name for kernel in found} == set(kernels_for(multiarch, region)) != set()


def test_the_order_of_the_map_makes_no_difference() -> None:
    library_map = read("librdc_linked.so")
    starts = [region.span.start for region in regions(library_map)]
    usage = usage_of(library_usage(library_map, dict.fromkeys(starts, ())))
    turned = replace(
        library_map,
        sections=tuple(replace(s, regions=s.regions[::-1]) for s in library_map.sections[::-1]),
    )

    found = plan(turned, usage)

    assert found == plan(library_map, usage)
    assert [d.start for d in found.decisions] == sorted(d.start for d in found.decisions)
    names = [kernel.name for kernel in found.used_kernels]
    assert names == sorted(names)


def test_union_of_devices() -> None:
    library_map = read("libmultiarch.so", "8.6", "9.0")
    region = regions(library_map)[0]
    used = library_usage(library_map, {region.span.start: kernels_for(library_map, region)})

    found = plan(library_map, usage_of(used), devices=(ComputeCapability(8, 6), H200))

    kept = {d.start for d in found.decisions if d.kept}
    assert kept == {e.payload.start for e in region.elements if str(e.arch) in ("sm_86", "sm_90")}


@pytest.mark.parametrize(
    ("policy", "archs"),
    [
        (KeepPolicy(devices=(ComputeCapability(8, 9),)), {"sm_86"}),
        (KeepPolicy(devices=(ComputeCapability(7, 5),)), {"sm_75"}),
        (KeepPolicy(ptx="newest"), {"sm_120"}),
        (KeepPolicy(ptx="all"), {"sm_120"}),
    ],
)
def test_policies_keep_more_of_what_was_used(policy: KeepPolicy, archs: set[str]) -> None:
    library_map = read("libmultiarch.so", "8.9", "7.5", "9.0")
    region = regions(library_map)[2]
    used = library_usage(library_map, {region.span.start: kernels_for(library_map, region)[:1]})

    found = plan(library_map, usage_of(used), policy)

    kept = {d.start for d in found.decisions if d.kept}
    by_start = {e.payload.start: e for e in library_map.iter_code()}
    assert {str(by_start[start].arch) for start in kept} == {"sm_90", *archs}
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("ptx", "archs"), [("off", set()), ("newest", {"sm_90"}), ("all", {"sm_80", "sm_90"})]
)
def test_which_ptx_of_a_used_region_stays(ptx: str, archs: set[str]) -> None:
    library_map = read("libclang.so")
    region = regions(library_map)[0]
    used = library_usage(library_map, {region.span.start: kernels_for(library_map, region)})

    found = plan(library_map, usage_of(used), KeepPolicy(ptx=ptx))

    kept = {d.start for d in found.decisions if d.kept}
    ptx_of_region = [e for e in region.elements if e.kind is ElementKind.PTX]
    assert {str(e.arch) for e in ptx_of_region} == {"sm_80", "sm_90"}
    assert {str(e.arch) for e in ptx_of_region if e.payload.start in kept} == archs


def test_kernel_globs_keep_and_note_what_they_matched(multiarch: LibraryMap) -> None:
    name = kernels_for(multiarch, regions(multiarch)[0])[0]
    globs = GlobSet([f"{name[:-2]}*", "nothing_like_it"])

    found = plan(multiarch, usage_of(library_usage(multiarch, {})), KeepPolicy(kernels=globs))

    kept = [d for d in found.decisions if d.kept]
    assert [d.reason for d in kept] == [KeepReason.KERNEL_POLICY.value]
    assert globs.matched == {f"{name[:-2]}*"}


def test_the_plan_keeps_what_healing_gave_back(multiarch: LibraryMap) -> None:
    region = regions(multiarch)[0]
    element = region.elements[0]
    span = Need(
        library=multiarch.library.path,
        spans=(element.payload,),
        nodeid="tests/test_a.py::test_b",
        witness=Witness.REFUSED,
    )
    usage = usage_of(library_usage(multiarch, {}))

    before, healed = plan(multiarch, usage), plan(multiarch, usage, KeepPolicy(healed=(span,)))

    assert not any(d.kept for d in before.decisions)
    [kept] = [d for d in healed.decisions if d.kept]
    assert (kept.start, kept.end) == element.payload
    assert kept.reason == KeepReason.HEALED.value and kept.detail == span.reason


def test_veto_keeps_what_nothing_else_does(multiarch: LibraryMap) -> None:
    first = next(multiarch.iter_code())
    policy = KeepPolicy(vetoes=(lambda _, e: "mine" if e is first else None,))

    found = plan(multiarch, usage_of(library_usage(multiarch, {})), policy)

    [kept] = [d for d in found.decisions if d.kept]
    assert (kept.start, kept.reason, kept.detail) == (
        first.payload.start,
        KeepReason.HOOK.value,
        "mine",
    )


def _incomplete(library_map: LibraryMap) -> LibraryPlan:
    return plan(library_map, usage_of(library_usage(library_map, {})), incomplete="a gap")


def _no_device(library_map: LibraryMap) -> LibraryPlan:
    usage = usage_of(library_usage(library_map, {}), devices=())
    return plan(library_map, usage, devices=())


def _changed(library_map: LibraryMap) -> LibraryPlan:
    return plan(library_map, usage_of(library_usage(library_map, {})), changed="two libraries")


def _unmatched(library_map: LibraryMap) -> LibraryPlan:
    return plan(library_map, usage_of(library_usage(library_map, {0x10: ["k"]})))


@pytest.mark.parametrize("kind", [ElementKind.TILE_IR, ElementKind.BITCODE, ElementKind.UNKNOWN])
def test_code_of_which_no_rule_tells_who_loads_it_is_kept(
    multiarch: LibraryMap, kind: ElementKind
) -> None:
    region = regions(multiarch)[0]
    opaque = replace(region.elements[0], kind=kind)
    changed = replace(region, elements=(opaque, *region.elements[1:]))
    [section] = [s for s in multiarch.sections if region in s.regions]
    others = tuple(changed if r is region else r for r in section.regions)
    library_map = replace(
        multiarch,
        sections=tuple(
            replace(s, regions=others) if s is section else s for s in multiarch.sections
        ),
    )

    found = plan(library_map, usage_of(library_usage(library_map, {})))

    [kept] = [d for d in found.decisions if d.kept]
    assert (kept.start, kept.reason) == (opaque.payload.start, KeepReason.UNREADABLE.value)
    assert kept.detail == f"no rule tells which devices load {kind.value}"


def _policy(library_map: LibraryMap) -> LibraryPlan:
    usage = usage_of(library_usage(library_map, {}))
    return plan(library_map, usage, KeepPolicy(whole_library="keep.libraries: lib*"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_incomplete, KeepReason.INCOMPLETE),
        (_no_device, KeepReason.INCOMPLETE),
        (_changed, KeepReason.CHANGED),
        (_unmatched, KeepReason.UNMATCHED),
        (_policy, KeepReason.LIBRARY_POLICY),
    ],
)
def test_missing_data_means_keep(
    multiarch: LibraryMap, make: Callable[[LibraryMap], LibraryPlan], reason: KeepReason
) -> None:
    found = make(multiarch)

    assert reasons(found) == {reason.value: 21}
    assert found.unused_bytes == 0
    assert len(found.notes) == 1
    assert negativa_ml_spans(found)["spans"] == []


def test_places_that_are_not_understood_are_noted(multiarch: LibraryMap) -> None:
    problems = ("at offset 0x40: no container", "at offset 0x80: no header")
    usage = usage_of(library_usage(multiarch, {}))

    found = plan(replace(multiarch, problems=problems), usage)

    [note] = found.notes
    assert note.startswith("2 places") and note.endswith("at offset 0x40: no container")


def test_used_kernel_that_no_chosen_element_has_keeps_its_region(multiarch: LibraryMap) -> None:
    region = regions(multiarch)[0]
    used = library_usage(multiarch, {region.span.start: ["no_such_kernel"]})

    found = plan(multiarch, usage_of(used))

    kept = {d.start for d in found.decisions if d.kept}
    assert kept == {e.payload.start for e in region.elements}
    assert reasons(found)[KeepReason.UNMATCHED.value] == 7


def test_frame_is_found_by_the_hash_of_its_content() -> None:
    library_map = read("libframes.so")
    frames = tuple(library_map.iter_frames())
    fitting = [f for f in frames if f.content is not None]
    used = fitting[0]
    assert used.digest is not None
    usage = usage_of(
        library_usage(library_map, {}), memory={used.digest: (used.unpacked_size, ["k"])}
    )

    found = plan(library_map, usage)

    assert {d.start: d.reason for d in found.decisions} == {
        f.span.start: (
            KeepReason.MEMORY_IMAGE.value if f is used else NO_KERNEL if f in fitting else WRONG
        )
        for f in frames
    }
    # The driver reads what it loads, so others on the same pages are not touched.
    [library] = usage.libraries
    read_by_driver = replace(library, touched=around([used.span], PAGE_SIZE))
    assert plan(library_map, replace(usage, libraries=(read_by_driver,))) == found
    assert len(fitting) == 2
    # Nothing tells which frame has the same code for another device.
    policy = KeepPolicy(devices=(ComputeCapability(8, 0),))
    kept = {d.start: d.reason for d in plan(library_map, usage, policy).decisions if d.kept}
    assert kept == {
        f.span.start: (KeepReason.MEMORY_IMAGE if f is used else KeepReason.ARCH_POLICY).value
        for f in frames
        if f is used or f not in fitting
    }


def test_what_was_read_past_the_driver_is_kept() -> None:
    library_map = read(str(QUICKSTART_LIBRARY))
    used, *_, other = regions(library_map)
    kernels = kernels_for(library_map, used)
    usage = usage_of(library_usage(library_map, {used.span.start: kernels}))
    [library] = usage.libraries
    # The driver reads the headers of the region and the payload that it loads.
    loaded = next(d for d in plan(library_map, usage).decisions if d.kept)
    headers = [Span(e.header_offset, e.payload.start) for e in used.elements]
    its_pages = around([*headers, (loaded.start, loaded.end)], PAGE_SIZE)
    element = max(other.elements, key=lambda e: e.payload.size)
    end = element.payload.end // PAGE_SIZE * PAGE_SIZE
    payloads = [e.payload for e in other.elements]
    on_page = {p.start for p in payloads if p.start < end and end - PAGE_SIZE < p.end}
    past_it = (*its_pages, Span(end - PAGE_SIZE, end))
    for touched, kept in (its_pages, set()), (past_it, on_page):
        read_past = replace(library, touched=tuple(touched))
        found = plan(library_map, replace(usage, libraries=(read_past,)))
        assert {d.start for d in found.decisions if d.reason == "touched"} == kept
    # An eager driver reads all headers.
    warning = UsageWarning(code=EAGER_LOADING, text="", process=0)
    eager = replace(usage, libraries=(read_past,), warnings=(warning,))
    assert reasons(plan(library_map, eager))["touched"] == 0


def test_element_that_may_be_an_image_in_memory_is_kept(multiarch: LibraryMap) -> None:
    [element, *_] = [e for e in multiarch.iter_code() if e.content is not None]
    kernel = multiarch.kernels_of(element.content)[0].name
    usage = usage_of(
        library_usage(multiarch, {}), memory={"ab" * 32: (element.unpacked_size, [kernel])}
    )

    found = plan(multiarch, usage)

    [kept] = [d for d in found.decisions if d.kept]
    assert (kept.start, kept.reason) == (element.payload.start, KeepReason.MEMORY_IMAGE.value)


@pytest.mark.parametrize(
    ("is_empty", "kept_relocatable"),
    [
        (False, 0),
        (True, 2),
    ],
)
def test_relocatable_code_is_kept_where_the_driver_may_link_it(
    is_empty: bool, kept_relocatable: int
) -> None:
    """The linked region names it, also if it has no code at all."""
    library_map = read("librdc_linked.so", "9.0")
    linked = [
        r
        for s in library_map.sections
        if s.name == ".nv_fatbin"
        for r in s.regions
        if kernels_for(library_map, r)
    ]
    relocatable = [r for s in library_map.sections if s.name == "__nv_relfatbin" for r in s.regions]
    assert len(linked) == 1 and len(relocatable) == 2
    start = linked[0].span.start
    used = library_usage(
        library_map,
        {start: kernels_for(library_map, linked[0])[:1]},
        prelinked={start: [r.span.start for r in relocatable]},
    )
    if is_empty:
        sections = tuple(
            replace(
                section,
                regions=tuple(replace(r, elements=()) for r in section.regions)
                if section.name == ".nv_fatbin"
                else section.regions,
            )
            for section in library_map.sections
        )
        library_map = replace(library_map, sections=sections)

    found = plan(library_map, usage_of(used))

    assert reasons(found)[KeepReason.RELOCATABLE.value] == kept_relocatable
