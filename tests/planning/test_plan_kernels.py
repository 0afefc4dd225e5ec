"""Plans at kernel granularity: what of the cubins that stay is unused, and which stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Cubin, Element, LibraryMap, Region, Scope
from pytest_negativa.models.plan import KeepReason, LibraryPlan, UnusedReason
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import (
    LibraryUsage,
    Usage,
)
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.settings.globs import GlobSet
from tests.support.libraries import BIN
from tests.support.usages import image_use, library_usage, usage_of

H200 = ComputeCapability(9, 0)


def policy(**changes: object) -> KeepPolicy:
    return KeepPolicy(granularity="kernel", **changes)  # type: ignore[arg-type]


def read(name: str, *devices: str) -> LibraryMap:
    return read_library(BIN / name, Scope(devices=devices or ("9.0",)))


def plan(
    library_map: LibraryMap, usage: Usage, keep: KeepPolicy | None = None, device: object = H200
) -> LibraryPlan:
    located = locate_library(library_map, usage.libraries[0], usage)
    assert isinstance(device, ComputeCapability)
    return plan_library(located, (device,), keep or policy())


def used(library_map: LibraryMap, *kernels: str) -> LibraryUsage:
    """A use of the first region that the device can load."""
    region = next(r for r in library_map.iter_regions() if any(e.content for e in r.elements))
    return library_usage(library_map, {region.span.start: kernels})


def linked(library_map: LibraryMap, arch: str = "sm_90") -> Element:
    return next(
        e for e in library_map.iter_code() if isinstance(e.content, Cubin) and str(e.arch) == arch
    )


def test_what_no_used_kernel_reaches_is_unused() -> None:
    library_map = read("libcallgraph.so")

    found = plan(library_map, usage_of(used(library_map, "calls_shared")))

    [cubin] = found.trimmed
    element = linked(library_map)
    assert isinstance(element.content, Cubin)
    assert cubin.start == element.payload.start
    assert cubin.kept == ("$calls_shared$_Z13shared_by_twof", "calls_shared")
    assert cubin.reason is UnusedReason.UNREACHABLE_KERNEL
    sizes = {library_map.names[k.name]: k.code_size for k in element.content.kernels}
    assert cubin.code_size == sum(sizes.values())
    assert cubin.unused_size == cubin.code_size - sizes["calls_shared"]
    # The element as a whole stays what it is at the other granularity.
    element_plan = plan(library_map, usage_of(used(library_map, "calls_shared")), KeepPolicy())
    assert element_plan == replace(found, trimmed=(), granularity="element")
    assert found.notes == ()


def test_of_two_kernels_one_goes() -> None:
    library_map = read("liblineinfo.so")
    element = linked(library_map)
    assert isinstance(element.content, Cubin)
    first, second = (library_map.names[kernel.name] for kernel in element.content.kernels)

    [cubin] = plan(library_map, usage_of(used(library_map, first))).trimmed

    assert cubin.kept == (first,) and second not in cubin.kept
    assert 0 < cubin.unused_size < cubin.code_size
    both = plan(library_map, usage_of(used(library_map, first, second)))
    assert both.trimmed == () and both.notes == ()


def moved(region: Region, by: int) -> Region:
    def span(old: Span) -> Span:
        return Span(old.start + by, old.end + by)

    elements = tuple(
        replace(e, header_offset=e.header_offset + by, payload=span(e.payload))
        for e in region.elements
    )
    return replace(region, span=span(region.span), elements=elements)


def test_a_kernel_that_another_image_used_stays_in_all() -> None:
    library_map = read("libcallgraph.so")
    section = library_map.sections[0]
    first = next(r for r in section.regions if any(e.content for e in r.elements))
    second = moved(first, 1 << 20)
    both = replace(library_map, sections=(replace(section, regions=(second, first)),))
    uses = {first.span.start: ["calls_shared"], second.span.start: ["calls_chain"]}

    found = plan(both, usage_of(library_usage(both, uses)))

    starts = [linked(library_map).payload.start + by for by in (0, 1 << 20)]
    assert [cubin.start for cubin in found.trimmed] == starts
    kept = [set(cubin.kept) for cubin in found.trimmed]
    assert len(kept) == 2 and kept[0] == kept[1]
    assert kept[0] >= {"calls_shared", "calls_chain"}


def test_other_archs_lose_the_same_kernels() -> None:
    library_map = read("libcallgraph.so", "9.0", "7.5")
    keep = policy(devices=(ComputeCapability(7, 5),))

    found = plan(library_map, usage_of(used(library_map, "calls_shared")), keep)

    archs = ("sm_75", "sm_90")
    assert [t.start for t in found.trimmed] == [linked(library_map, a).payload.start for a in archs]
    kernels = [{n for n in t.kept if not n.startswith("$")} for t in found.trimmed]
    assert kernels == [{"calls_shared"}, {"calls_shared"}]
    # Of an arch that goes as a whole, nothing is trimmed.
    [only] = plan(library_map, usage_of(used(library_map, "calls_shared"))).trimmed
    assert only.start == linked(library_map, "sm_90").payload.start


def test_functions_whose_address_was_looked_up_stay() -> None:
    library_map = read("libpointers.so")
    element = next(
        e
        for e in library_map.iter_code()
        if isinstance(e.content, Cubin) and not e.content.relocatable
    )
    region = next(r for r in library_map.iter_regions() if element in r.elements)
    usage = library_usage(library_map, {region.span.start: ["plain"]})
    without = plan(library_map, usage_of(usage))
    [image] = usage.images
    image = replace(image, functions=("_Z6calledf",))

    found = plan(library_map, usage_of(replace(usage, images=(image,))))

    assert set(found.trimmed[0].kept) - set(without.trimmed[0].kept) == {
        "_Z6calledf",
        "__cuda_sm3x_div_rn_noftz_f32_slowpath",
    }
    image = replace(image, functions=("_Z4gonef",))
    found = plan(library_map, usage_of(replace(usage, images=(image,))))
    assert found.trimmed == () and "a kernel that was used is not in them" in found.notes[0]


def test_frames_are_matched_by_their_images_kernels() -> None:
    library_map = read("libframes.so")
    frame = next(
        f
        for f in library_map.iter_frames()
        if "calls_shared" in (k.name for k in library_map.kernels_of(f.content))
    )
    assert frame.digest is not None
    memory = {frame.digest: (frame.unpacked_size, ["calls_shared"])}

    found = plan(library_map, usage_of(library_usage(library_map, {}), memory=memory))

    [cubin] = found.trimmed
    assert cubin.start == frame.span.start
    assert {n for n in cubin.kept if not n.startswith("$")} == {"calls_shared"}


def _enumerated(library_map: LibraryMap) -> LibraryPlan:
    usage = used(library_map)
    [image] = usage.images
    use = image_use(["calls_shared"], enumerated=True)
    return plan(library_map, usage_of(replace(usage, images=(replace(use, offset=image.offset),))))


def _without_lookup(library_map: LibraryMap) -> LibraryPlan:
    return plan(library_map, usage_of(used(library_map)))


def _veto(library_map: LibraryMap) -> LibraryPlan:
    keep = policy(vetoes=(lambda _map, _element: "mine",))
    return plan(library_map, usage_of(used(library_map, "calls_shared")), keep)


def _unpacked_too(library_map: LibraryMap) -> LibraryPlan:
    memory = {"ab" * 32: (linked(library_map).unpacked_size, ["calls_chain"])}
    return plan(library_map, usage_of(used(library_map, "calls_shared"), memory=memory))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_enumerated, ": it can't be told which of their kernels were used"),
        (_without_lookup, ": it can't be told which of their kernels were used"),
        (_veto, " (5,760 bytes of code): mine"),
        (_unpacked_too, ": the library may have unpacked and loaded them in another way, too"),
    ],
)
def test_what_stays_whole_is_noted(make: Callable[[LibraryMap], LibraryPlan], reason: str) -> None:
    library_map = read("libcallgraph.so")

    found = make(library_map)

    assert found.trimmed == ()
    assert found.notes == (f"1 loaded element stays whole, unused kernels too{reason}",)
    start = linked(library_map).payload.start
    assert [d.reason for d in found.decisions if d.start == start] == [KeepReason.LOADED.value]


def test_code_with_capsules_stays_whole() -> None:
    library_map = read("libcallgraph.so", "10.0")

    found = plan(
        library_map, usage_of(used(library_map, "calls_shared")), device=ComputeCapability(10, 0)
    )

    code = linked(library_map, "sm_100").content
    assert isinstance(code, Cubin)
    unused = sum(k.code_size for k in code.kernels if library_map.names[k.name] != "calls_shared")
    assert found.trimmed == ()
    assert found.notes == (
        f"1 loaded element stays whole, unused kernels too ({unused:,} bytes of code): NVIDIA's "
        "linker crashes on overwritten sm_100 code and capsules (.nv.capmerc)",
    )


def test_other_reasons_keep_all_kernels() -> None:
    library_map = read("libcallgraph.so")
    usage = usage_of(library_usage(library_map, {}))

    found = plan(library_map, usage, policy(kernels=GlobSet(["calls_shared"])))

    assert [d.reason for d in found.decisions if d.kept] == [KeepReason.KERNEL_POLICY.value]
    assert found.trimmed == ()
    assert found.notes == ()

    # It has no code for this device, and was loaded.
    library_map = read("libcallgraph.so", "7.5", "9.0")
    usage = usage_of(used(library_map, "calls_shared"))
    found = plan(library_map, usage, device=ComputeCapability(8, 0))
    assert {d.reason for d in found.decisions} == {KeepReason.UNMATCHED.value}
    assert found.trimmed == ()
    assert found.notes == ()


def test_a_single_kernel_stays_without_a_note() -> None:
    library_map = read("librdc_linked.so")
    [single, *_] = [r for r in library_map.iter_regions() if len(r.elements) == 2]

    found = plan(library_map, usage_of(library_usage(library_map, {single.span.start: ()})))

    assert [d.reason for d in found.decisions if d.kept] == [KeepReason.LOADED.value]
    assert found.trimmed == () and found.notes == ()


def test_a_kernel_that_another_arch_lacks_keeps_that_cubin_whole() -> None:
    library_map = read("libcallgraph.so", "9.0", "7.5")
    region = next(library_map.iter_regions())
    old = linked(library_map, "sm_75")
    assert isinstance(old.content, Cubin)
    names = library_map.names
    without = tuple(k for k in old.content.kernels if names[k.name] != "calls_shared")
    changed = replace(old, content=replace(old.content, kernels=without))
    elements = tuple(changed if e is old else e for e in region.elements)
    [section] = library_map.sections
    library_map = replace(
        library_map,
        sections=(replace(section, regions=(replace(region, elements=elements),)),),
    )
    keep = policy(devices=(ComputeCapability(7, 5),))

    found = plan(library_map, usage_of(used(library_map, "calls_shared")), keep)

    assert [t.start for t in found.trimmed] == [linked(library_map).payload.start]
    assert "a kernel that was used is not in them" in found.notes[0]


def test_a_kernel_that_a_used_one_launches_is_used() -> None:
    library_map = read("libcallgraph.so")
    names = library_map.names
    (section,) = library_map.sections
    old = linked(library_map)
    assert isinstance(old.content, Cubin)
    launch = names.index("calls_shared"), names.index("calls_chain")
    launching = replace(old, content=replace(old.content, references=(launch,)))
    regions = tuple(
        replace(r, elements=tuple(launching if e is old else e for e in r.elements))
        for r in section.regions
    )
    library_map = replace(library_map, sections=(replace(section, regions=regions),))

    found = plan(library_map, usage_of(used(library_map, "calls_shared")))

    assert [kernel.name for kernel in found.used_kernels] == ["calls_chain", "calls_shared"]
    assert len({kernel.first for kernel in found.used_kernels}) == 1
    assert "calls_chain" not in found.unused_kernels
