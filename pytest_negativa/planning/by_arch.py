"""A plan from a map alone: what a device of given archs could load stays. No trace is needed.

The driver's choice (``arch.choose_elements``) holds where the driver is handed a region. Elsewhere
than in ``.nv_fatbin`` a library may read its regions itself, by rules of its own: there, and for
bare frames, all machine code that runs on one of the devices stays, and the PTX and LTO-IR nearest
to it. That is so in relocatable code (``__nv_relfatbin``), too: what is linked with code for a
device stays with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    can_be_compiled_for,
    choose_elements,
    cubin_runs_on,
)
from pytest_negativa.models.library import Element, LibraryMap, Region
from pytest_negativa.models.plan import (
    PLAN_VERSION,
    Decision,
    KeepReason,
    LibraryPlan,
    UnusedReason,
)

_DRIVERS_CHOICE = ".nv_fatbin"
_COMPILED = (ElementKind.PTX, ElementKind.LTO_IR)
_UNUSED = (False, UnusedReason.WRONG_ARCH.value, None)


def plan_for_devices(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], *, keep_ptx: bool
) -> LibraryPlan:
    """Keep what ``devices`` can load, of every region; ``keep_ptx``: and all PTX."""
    decisions: list[Decision] = []
    for section in library_map.sections:
        for region in section.regions:
            decisions += _decide(region, devices, section.name == _DRIVERS_CHOICE, keep_ptx)
        for frame in section.frames:
            keep = (
                (True, KeepReason.UNREADABLE.value, frame.unreadable)
                if frame.unreadable is not None
                else (True, KeepReason.ARCH_POLICY.value, str(frame.arch))
                if any(cubin_runs_on(frame.arch, device) for device in devices)
                else _UNUSED
            )
            decisions.append(Decision(frame.span.start, frame.span.end, *keep))
    return _plan(library_map, devices, decisions)


def plan_for_none(library_map: LibraryMap) -> LibraryPlan:
    """Keep nothing, of whatever kind, whether it can be read or not: nobody loads the library."""
    spans = [element.payload for element in library_map.iter_elements()]
    spans += [frame.span for frame in library_map.iter_frames()]
    unused = (False, UnusedReason.NO_USED_KERNEL.value)
    return _plan(library_map, (), [Decision(span.start, span.end, *unused) for span in spans])


def _plan(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], decisions: Sequence[Decision]
) -> LibraryPlan:
    return LibraryPlan(
        format_version=PLAN_VERSION,
        library=library_map.library,
        devices=tuple(map(str, devices)),
        decisions=tuple(sorted(decisions, key=lambda d: d.start)),
        used_kernels=(),
        unused_kernels=(),
    )


def _decide(
    region: Region, devices: Sequence[ComputeCapability], drivers_choice: bool, keep_ptx: bool
) -> Iterator[Decision]:
    choose = choose_elements if drivers_choice else _loadable
    chosen = {index for device in devices for index in choose(region.elements, device)}
    for index, element in enumerate(region.elements):
        start, end = element.payload.start, element.payload.end
        if element.unreadable is not None:
            yield Decision(start, end, True, KeepReason.UNREADABLE.value, element.unreadable)
        elif element.kind is ElementKind.UNKNOWN:
            yield Decision(start, end, True, KeepReason.UNREADABLE.value, "of an unknown kind")
        elif index in chosen:
            yield Decision(start, end, True, KeepReason.ARCH_POLICY.value, str(element.arch))
        elif keep_ptx and element.kind is ElementKind.PTX:
            yield Decision(start, end, True, KeepReason.PTX_POLICY.value, "all")
        else:
            yield Decision(start, end, *_UNUSED)


def _loadable(elements: Sequence[Element], device: ComputeCapability) -> tuple[int, ...]:
    """All machine code that runs on the device, and the nearest of what is compiled for it."""
    found = [
        index
        for index, element in enumerate(elements)
        if element.kind is ElementKind.CUBIN and cubin_runs_on(element.arch, device)
    ]
    for kind in _COMPILED:
        usable = [
            (element.arch, index)
            for index, element in enumerate(elements)
            if element.kind is kind and can_be_compiled_for(element.arch, device)
        ]
        nearest = max((arch for arch, _ in usable), default=None)
        found += [index for arch, index in usable if arch == nearest]
    return tuple(found)
