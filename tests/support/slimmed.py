"""Compacted libraries: how tests make one, and what its map must say."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import map_slimmed, read_library
from pytest_negativa.gpucode.slimmed import WHOLE, is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import (
    Cubin,
    LibraryMap,
    Removed,
    Scope,
)
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import Span
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.original_tables import read_tables
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    CompactOptions,
    Cut,
    Smaller,
)
from pytest_negativa.rewriting.layout import Edits
from pytest_negativa.slimming.spares import plan_cut
from pytest_negativa.storage.records import decode_map, encode_record
from tests.support.usages import library_usage, usage_of

H200 = ComputeCapability(9, 0)


def with_digest(library_map: LibraryMap) -> LibraryMap:
    digest = hashlib.sha256(Path(library_map.library.path).read_bytes()).hexdigest()
    identity = msgspec.structs.replace(library_map.library, sha256=digest)
    return msgspec.structs.replace(library_map, library=identity)


def read_slimmed(path: Path, scope: Scope) -> tuple[LibraryMap, Removed]:
    with ByteSource(path) as source:
        return map_slimmed(source, read_host_elf(source), scope)


def read(path: Path) -> LibraryMap:
    return with_digest(read_library(path, Scope()))


def plan_for(library_map: LibraryMap, kernel: str) -> LibraryPlan:
    """Where ``kernel`` alone was used, of the first region that has it, linked."""
    [region, *_] = [
        region
        for region in library_map.iter_regions()
        for element in region.elements
        if isinstance(element.content, Cubin)
        and not element.content.relocatable
        and kernel in {k.name for k in library_map.kernels_of(element.content)}
    ]
    usage = usage_of(library_usage(library_map, {region.span.start: [kernel]}))
    located = locate_library(library_map, usage.libraries[0], usage)
    return plan_library(located, (H200,), KeepPolicy(granularity="kernel"))


def compact(
    library_map: LibraryMap, plan: LibraryPlan, target: Path, edits: Edits | None = None
) -> Smaller:
    """Without what is never loaded, so that there is always something to gain."""
    options = CompactOptions(min_gain=-(1 << 30))
    done = compact_library(library_map.library.path, target, library_map, plan, edits, options)
    assert is_slimmed(target)
    return done


def cut(library_map: LibraryMap, plan: LibraryPlan, folder: Path) -> Cut:
    """Cut as ``slim --spare`` does."""
    path = Path(library_map.library.path)
    with ByteSource(path) as source:
        needed, containers = plan_cut(source, library_map, plan)
    return cut_library(path, folder / path.name, folder, needed, CutOptions(), containers)


def check_left(library_map: LibraryMap, plan: LibraryPlan, done: Cut) -> Removed:
    """Check that all that is kept is read again from a cut library, and nothing that lost bytes."""
    after, removed = read_slimmed(done.library, library_map.scope)
    check_slimmed(after)
    whole = tuple(
        span
        for span in (block.payload for block in library_map.iter_code())
        if not any(start < span.end and span.start < end for start, end in done.holes)
    )
    found = rows(after)
    assert rows(library_map, plan).items() <= found.items()
    assert found.items() <= rows(library_map, plan, whole).items()
    return removed


def rows(
    library_map: LibraryMap, plan: LibraryPlan | None = None, whole: tuple[Span, ...] = ()
) -> dict[int, tuple[Any, ...]]:
    """All that is kept, or all, by address: the header's, or the frame's.

    ``whole``: what is there though it is unused.
    """
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept} if plan else set()
    unused -= {(span.start, span.end) for span in whole}
    found: dict[int, tuple[Any, ...]] = {}
    for section in library_map.sections:
        shift = section.vaddr - section.span.start
        for region in section.regions:
            for element in region.elements:
                span = element.payload
                if (span.start, span.end) not in unused:
                    found[element.header_offset + shift] = (
                        *(section.name, region.span.start + shift, span.start + shift, span.size),
                        *(element.kind, element.arch, element.compression),
                        *(element.stored_size, element.unpacked_size),
                        *(element.identifier, element.unreadable),
                        library_map.kernels_of(element.content),
                    )
        for frame in section.frames:
            if (frame.span.start, frame.span.end) not in unused:
                found[frame.span.start + shift] = (
                    *(section.name, frame.span.size, frame.arch, frame.unpacked_size),
                    *(frame.unreadable, library_map.kernels_of(frame.content)),
                )
    return found


def check_slimmed(library_map: LibraryMap) -> None:
    """What holds whatever the bytes were."""
    used: list[Span] = []
    for section in library_map.sections:
        assert section.span.start == section.vaddr
        spans = [region.span for region in section.regions] + [f.span for f in section.frames]
        assert all(section.span.start <= s.start <= s.end <= section.span.end for s in spans)
        used += spans
    ordered = sorted(used)
    assert all(a.end <= b.start for a, b in itertools.pairwise(ordered))
    assert decode_map(encode_record(library_map), "memory") == library_map


def refusal(
    path: Path,
    target: Path,
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
) -> CannotCompactError:
    """Why compaction leaves a library as it is."""
    with pytest.raises(CannotCompactError) as found:
        compact_library(path, target, library_map, plan, edits, options)
    return found.value


def dropped(path: Path, target: Path) -> set[str]:
    """Names of the sections that compaction left out."""
    found = []
    for file in (path, target):
        with ByteSource(file) as source:
            names = (name.decode() for name in read_tables(source).names)
            found.append({name.removeprefix(WHOLE) for name in names})
    return found[0] - found[1]
