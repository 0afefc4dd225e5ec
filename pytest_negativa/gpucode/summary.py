"""A ``LibraryMap`` to its ``LibrarySummary``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    SmArch,
    choose_elements,
    cubin_runs_on,
)
from pytest_negativa.models.library import Content, Cubin, LibraryMap, Ptx, Section
from pytest_negativa.models.summary import CodeRow, LibrarySummary, SectionRow

FRAME = "frame"
"""The ``kind`` of a ``CodeRow`` for bare frames."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An element or frame, as far as the sums go."""

    arch: SmArch
    kind: str
    stored: int
    unpacked: int
    content: Content | None
    unreadable: bool
    loaded: bool


@dataclass(slots=True)
class _Sums:
    items: int = 0
    stored: int = 0
    unpacked: int = 0
    unreadable: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    read: bool = False
    kernels: set[int] = field(default_factory=set)


def summarize(library_map: LibraryMap, device: ComputeCapability | None = None) -> LibrarySummary:
    """Add up a map; with ``device``, also what a device of that capability would load."""
    sums: dict[tuple[SmArch, str], _Sums] = defaultdict(_Sums)
    for section in library_map.sections:
        for item in _iter_items(section, device):
            row = sums[item.arch, item.kind]
            row.items += 1
            row.stored += item.stored
            row.unpacked += item.unpacked
            row.unreadable += item.unreadable
            if item.loaded:
                row.loaded += 1
                row.loaded_bytes += item.stored
            if isinstance(item.content, Cubin | Ptx):
                row.read = True
                row.kernels.update(_kernel_names(item.content))
    all_kernels: set[int] = set().union(*(row.kernels for row in sums.values()))
    library = library_map.library
    return LibrarySummary(
        path=library.path,
        size=library.size,
        build_id=library.build_id,
        soname=library.soname,
        device=None if device is None else str(device),
        sections=tuple(map(_section_row, library_map.sections)),
        code=tuple(
            CodeRow(
                arch=str(arch),
                kind=kind,
                elements=row.items,
                stored_bytes=row.stored,
                unpacked_bytes=row.unpacked,
                kernels=len(row.kernels) if row.read else None,
                unreadable=row.unreadable,
                loaded=None if device is None else row.loaded,
                loaded_bytes=None if device is None else row.loaded_bytes,
            )
            for (arch, kind), row in sorted(sums.items())
        ),
        kernels=None if library_map.scope.headers_only else len(all_kernels),
        problems=tuple(_iter_problems(library_map)),
    )


def _iter_items(section: Section, device: ComputeCapability | None) -> Iterator[_Item]:
    for region in section.regions:
        loaded = set() if device is None else set(choose_elements(region.elements, device))
        for index, element in enumerate(region.elements):
            yield _Item(
                arch=element.arch,
                kind=element.kind.value,
                stored=element.payload.size,
                unpacked=element.unpacked_size,
                content=element.content,
                unreadable=element.unreadable is not None,
                # What the element is isn't known, so neither is that nobody loads it.
                loaded=index in loaded or element.kind is ElementKind.UNKNOWN,
            )
    for frame in section.frames:
        yield _Item(
            arch=frame.arch,
            kind=FRAME,
            stored=frame.span.size,
            unpacked=frame.unpacked_size,
            content=frame.content,
            unreadable=frame.unreadable is not None,
            loaded=device is not None and cubin_runs_on(frame.arch, device),
        )


def _kernel_names(content: Content) -> Iterator[int]:
    if isinstance(content, Cubin):
        for kernel in content.kernels:
            yield kernel.name
    elif isinstance(content, Ptx):
        yield from content.kernels


def _section_row(section: Section) -> SectionRow:
    elements = [e for region in section.regions for e in region.elements]
    return SectionRow(
        name=section.name,
        size=section.span.size,
        regions=len(section.regions),
        frames=len(section.frames),
        elements=len(elements),
        code_bytes=sum(e.payload.size for e in elements) + sum(f.span.size for f in section.frames),
    )


def _iter_problems(library_map: LibraryMap) -> Iterator[str]:
    for problem in library_map.problems:
        yield f"at offset {problem.offset:#x}: {problem.text}; kept"
    for element in library_map.iter_elements():
        if element.unreadable is not None:
            yield f"element at offset {element.header_offset:#x}: {element.unreadable}; kept"
    for frame in library_map.iter_frames():
        if frame.unreadable is not None:
            yield f"frame at offset {frame.span.start:#x}: {frame.unreadable}; kept"
