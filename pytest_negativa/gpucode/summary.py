"""A ``LibraryMap`` to its ``LibrarySummary``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_negativa.arch import ComputeCapability, SmArch
from pytest_negativa.models.library import CodeBlock, Cubin, LibraryMap, Ptx, Section
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

    def add(self, block: CodeBlock, loaded: bool) -> None:
        self.blocks += 1
        self.stored += block.size
        self.unpacked += block.unpacked_size
        self.unreadable += block.unreadable is not None
        if loaded:
            self.loaded += 1
            self.loaded_bytes += block.size
        if isinstance(block.content, Cubin):
            self.read = True
            self.kernels.update(kernel.name for kernel in block.content.kernels)
        elif isinstance(block.content, Ptx):
            self.read = True
            self.kernels.update(block.content.kernels)


def summarize(library_map: LibraryMap, devices: Sequence[ComputeCapability] = ()) -> LibrarySummary:
    """Add up a map; with ``devices``, also the code that at least one of them loads."""
    sums: dict[tuple[SmArch, str], _Sums] = defaultdict(_Sums)
    library = library_map.library
    if library.file_kind.is_link_time:
        devices = ()
    loaded = library_map.needed_starts(devices)
    problems = [f"at offset {p.offset:#x}: {p.text}; kept" for p in library_map.problems]
    sections = []
    for section in library_map.sections:
        code_bytes = 0
        for block in section.iter_code():
            kind = FRAME if block.is_frame else block.kind.value
            # The device may load an opaque kind.
            sums[block.arch, kind].add(block, block.start in loaded or block.kind.is_opaque)
            code_bytes += block.size
            if block.unreadable is not None:
                what = "frame" if block.is_frame else "element"
                problems.append(
                    f"{what} at offset {block.header_offset:#x}: {block.unreadable}; kept"
                )
        sections.append(_section_row(section, code_bytes))
    all_kernels: set[int] = set().union(*(row.kernels for row in sums.values()))
    return LibrarySummary(
        path=library.path,
        file_kind=library.file_kind,
        size=library.size,
        build_id=library.build_id,
        foreign=library_map.foreign,
        soname=library.soname,
        devices=tuple(map(str, devices)),
        sections=tuple(sections),
        code=tuple(
            CodeRow(
                arch=str(arch),
                kind=kind,
                elements=row.blocks,
                stored_bytes=row.stored,
                unpacked_bytes=row.unpacked,
                kernels=len(row.kernels) if row.read else None,
                unreadable=row.unreadable,
                loaded=row.loaded if devices else None,
                loaded_bytes=row.loaded_bytes if devices else None,
            )
            for (arch, kind), row in sorted(sums.items())
        ),
        kernels=None if library_map.scope.headers_only else len(all_kernels),
        problems=tuple(problems),
    )


def _section_row(section: Section, code_bytes: int) -> SectionRow:
    frames = sum(block.is_frame for block in section.iter_code())
    return SectionRow(
        name=section.label,
        size=section.span.size,
        regions=len(section.regions),
        frames=frames,
        elements=sum(len(region.elements) for region in section.regions)
        + len(section.frames)
        - frames,
        code_bytes=code_bytes,
    )
