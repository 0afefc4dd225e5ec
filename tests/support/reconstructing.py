"""Real plans of the fixtures, and edits applied in the plainest way, for tests of rewriting."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pytest_negativa.arch import ComputeCapability, choose_elements
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.rewriting.layout import Edits, Fill
from tests.support.libraries import BIN
from tests.support.usages import library_usage, usage_of

H200 = ComputeCapability(9, 0)


def plan_of(library_map: LibraryMap, used_regions: Collection[int] = (0,)) -> LibraryPlan:
    """The plan of a run on an H200 that loaded the regions of these numbers, where it could."""
    regions = list(library_map.iter_regions())
    images = {
        regions[number].span.start: ()
        for number in used_regions
        if number < len(regions) and choose_elements(regions[number].elements, H200)
    }
    usage = usage_of(library_usage(library_map, images))
    located = locate_library(library_map, usage.libraries[0], usage)
    return plan_library(located, (H200,), KeepPolicy())


def planned_of(path: Path, used_regions: Collection[int] = (0,)) -> AnalyzedLibrary:
    request = MapRequest(scope=Scope(devices=("9.0",)), with_map=True, with_digest=True)
    [mapped] = map_libraries([path], request)
    assert mapped.library_map is not None, mapped.error
    return AnalyzedLibrary(mapped.library_map, plan_of(mapped.library_map, used_regions))


def trimmed_of(kernel: str = "calls_shared") -> AnalyzedLibrary:
    """A cubin, of which one kernel is used."""
    request = MapRequest(scope=Scope(devices=("9.0",)), with_map=True, with_digest=True)
    [mapped] = map_libraries([BIN / "libcallgraph.so"], request)
    library_map = mapped.library_map
    assert library_map is not None
    region = next(r for r in library_map.iter_regions() if any(e.content for e in r.elements))
    usage = usage_of(library_usage(library_map, {region.span.start: (kernel,)}))
    located = locate_library(library_map, usage.libraries[0], usage)
    plan = plan_library(located, (H200,), KeepPolicy(granularity="kernel"))
    assert plan.trimmed
    return AnalyzedLibrary(library_map, plan)


def apply(data: bytes, edits: Edits) -> bytes:
    changed = bytearray(data)
    for change in edits.changes:
        for offset in range(change.start, change.end):
            if isinstance(change, Fill):
                changed[offset] = change.value
            else:
                changed[offset] = change.data[offset - change.start]
    return bytes(changed)
