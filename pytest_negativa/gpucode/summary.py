"""A ``LibraryMap`` to its ``LibrarySummary``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_negativa.arch import ComputeCapability, ElementKind, SmArch
from pytest_negativa.models.library import Content, Cubin, LibraryMap, Ptx, Section
from pytest_negativa.models.summary import CodeRow, LibrarySummary, SectionRow

FRAME = "frame"
"""The ``kind`` of a ``CodeRow`` for bare frames."""


@dataclass(slots=True)
class _Sums:
    blocks: int = 0
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
    loaded = library_map.loaded_starts(() if device is None else (device,))
    for block in library_map.iter_code():
        row = sums[block.arch, FRAME if block.region is None else block.kind.value]
        row.blocks += 1
        row.stored += block.size
        row.unpacked += block.unpacked_size
        row.unreadable += block.unreadable is not None
        # Nobody knows what an unknown kind is, so a device may load it.
        if block.start in loaded or block.kind is ElementKind.UNKNOWN:
            row.loaded += 1
            row.loaded_bytes += block.size
        if isinstance(block.content, Cubin | Ptx):
            row.read = True
            row.kernels.update(_kernel_names(block.content))
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
                elements=row.blocks,
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


def _kernel_names(content: Content) -> Iterator[int]:
    if isinstance(content, Cubin):
        for kernel in content.kernels:
            yield kernel.name
    elif isinstance(content, Ptx):
        yield from content.kernels


def _section_row(section: Section) -> SectionRow:
    return SectionRow(
        name=section.name,
        size=section.span.size,
        regions=len(section.regions),
        frames=len(section.frames),
        elements=sum(len(region.elements) for region in section.regions),
        code_bytes=sum(block.size for block in section.iter_code()),
    )


def _iter_problems(library_map: LibraryMap) -> Iterator[str]:
    for problem in library_map.problems:
        yield f"at offset {problem.offset:#x}: {problem.text}; kept"
    for block in library_map.iter_code():
        if block.unreadable is not None:
            what = "frame" if block.region is None else "element"
            yield f"{what} at offset {block.header_offset:#x}: {block.unreadable}; kept"
