"""A plan from a map alone: code that a device of given archs could load stays. It needs no trace.

The driver chooses among the elements of the regions in ``.nv_fatbin`` (``arch.choose_elements``).
A library may read regions in other sections, and bare frames, by rules of its own. There all
machine code that runs on one of the devices stays, and the PTX and LTO-IR nearest to it.
Relocatable code (``__nv_relfatbin``) counts as such: code that is linked for a device stays. So
does a linked region that the driver links it anew for.

All other code that can be read is "for other GPUs" (``_decide``). For a traced run this label comes
from ``planning.decide``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    can_be_compiled_for,
    cubin_runs_on,
)
from pytest_negativa.models.library import LINKED, Element, LibraryMap
from pytest_negativa.models.plan import (
    PLAN_VERSION,
    Decision,
    KeepReason,
    LibraryPlan,
    UnusedReason,
)
from pytest_negativa.planning.decide import why_plain

_Decided = tuple[bool, KeepReason | UnusedReason, str | None]
_Decide = Callable[[Element], _Decided]


def plan_for_devices(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], *, keep_ptx: bool
) -> LibraryPlan:
    """Keep the code that ``devices`` can load; with ``keep_ptx`` all PTX, too."""
    loaded = set(library_map.needed_starts(devices))
    for section in library_map.sections:
        if section.name != LINKED:
            for region in section.regions:
                if any(element.payload.start not in loaded for element in region.elements):
                    for device in devices:
                        loaded.update(_loadable(region.elements, device))
    return _plan(
        library_map, devices, lambda block: _decide(block, block.payload.start in loaded, keep_ptx)
    )


def plan_for_none(library_map: LibraryMap) -> LibraryPlan:
    """Keep nothing, readable or not: no program loads the library."""
    return _plan(library_map, (), lambda block: (False, UnusedReason.NO_USED_KERNEL, None))


def _plan(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], decide: _Decide
) -> LibraryPlan:
    decisions = [
        Decision(block.payload.start, block.payload.end, kept, reason.value, detail)
        for block in library_map.iter_code()
        for kept, reason, detail in [decide(block)]
    ]
    return LibraryPlan(
        format_version=PLAN_VERSION,
        library=library_map.library,
        devices=tuple(map(str, devices)),
        decisions=tuple(sorted(decisions, key=lambda d: d.start)),
        used_kernels=(),
        unused_kernels=(),
    )


def _decide(block: Element, loaded: bool, keep_ptx: bool) -> _Decided:
    is_wanted_ptx = keep_ptx and block.kind is ElementKind.PTX
    reasons = (
        (KeepReason.UNREADABLE, block.unreadable),
        (KeepReason.UNREADABLE, f"of kind {block.kind.value}" if block.kind.is_opaque else None),
        (KeepReason.PLAIN_CUBIN, why_plain(block)),
        (KeepReason.ARCH_POLICY, str(block.arch) if loaded else None),
        (KeepReason.PTX_POLICY, "all" if is_wanted_ptx else None),
    )
    for reason, detail in reasons:
        if detail is not None:
            return True, reason, detail
    return False, UnusedReason.WRONG_ARCH, None


def _loadable(elements: Sequence[Element], device: ComputeCapability) -> Iterator[int]:
    """Starts of all machine code that runs on the device, and of the nearest code to compile."""
    for element in elements:
        if element.kind is ElementKind.CUBIN and cubin_runs_on(element.arch, device):
            yield element.payload.start
    for kind in (ElementKind.PTX, ElementKind.LTO_IR):
        usable = [
            element
            for element in elements
            if element.kind is kind and can_be_compiled_for(element.arch, device)
        ]
        nearest = max((element.arch for element in usable), default=None)
        yield from (element.payload.start for element in usable if element.arch == nearest)
