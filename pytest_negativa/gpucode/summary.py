"""A map in figures; what devices load (or may: unknown kinds), or lack; sections for linkers.

No plan asks for either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    SmArch,
    can_be_linked,
    choose_elements,
)
from pytest_negativa.models.library import RELOCATABLE, Cubin, Element, LibraryMap, Ptx, Section
from pytest_negativa.models.summary import CodeRow, LibrarySummary, LoadableCode, SectionRow

FRAME = "frame"
"""The ``kind`` of a ``CodeRow`` for bare frames."""


def summarize(library_map: LibraryMap, devices: Sequence[ComputeCapability] = ()) -> LibrarySummary:
    """Add up a map; with ``devices``, also the code that at least one of them loads."""
    blocks: defaultdict[tuple[SmArch, str], list[Element]] = defaultdict(list)
    library = library_map.library
    if library.file_kind.is_link_time:
        devices = ()
    loaded = library_map.needed_starts(devices)
    problems = [f"{problem}; kept" for problem in library_map.problems]
    sections = []
    for section in library_map.sections:
        code_bytes = 0
        for block in section.iter_code():
            kind = FRAME if block.is_frame else block.kind.value
            blocks[block.arch, kind].append(block)
            code_bytes += block.payload.size
            if block.unreadable is not None:
                what = "frame" if block.is_frame else "element"
                problems.append(
                    f"{what} at offset {block.header_offset:#x}: {block.unreadable}; kept"
                )
        sections.append(_section_row(section, code_bytes))
    all_kernels = _kernels(chain.from_iterable(blocks.values()))
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
            _code_row(arch, kind, same, loaded if devices else None)
            for (arch, kind), same in sorted(blocks.items())
        ),
        kernels=None if library_map.scope.headers_only else len(all_kernels),
        problems=tuple(problems),
    )


def _code_row(
    arch: SmArch, kind: str, blocks: Sequence[Element], starts: frozenset[int] | None
) -> CodeRow:
    """The sums; ``starts`` are those of the code that devices load, None without devices."""
    # The device may load an opaque kind.
    loaded = [
        b.payload.size for b in blocks if (starts and b.payload.start in starts) or b.kind.is_opaque
    ]
    return CodeRow(
        arch=str(arch),
        kind=kind,
        elements=len(blocks),
        stored_bytes=sum(block.payload.size for block in blocks),
        unpacked_bytes=sum(block.unpacked_size for block in blocks),
        kernels=(
            len(_kernels(blocks))
            if any(isinstance(block.content, Cubin | Ptx) for block in blocks)
            else None
        ),
        unreadable=sum(block.unreadable is not None for block in blocks),
        loaded=None if starts is None else len(loaded),
        loaded_bytes=None if starts is None else sum(loaded),
    )


def _kernels(blocks: Iterable[Element]) -> set[int]:
    """Indices of the names of all kernels in the code that was read."""
    found: set[int] = set()
    for block in blocks:
        if isinstance(content := block.content, Cubin):
            found.update(kernel.name for kernel in content.kernels)
        elif isinstance(content, Ptx):
            found.update(content.kernels)
    return found


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


def loadable_code(library_map: LibraryMap, device: ComputeCapability) -> LoadableCode:
    """Count the regions by the driver's choice for a device, see ``arch.choose_elements``.

    A cubin that is known to be empty is no code: device linkers make one for each arch.
    """
    sections = loaded_sections(library_map, device)
    chosen = [
        [
            element
            for index in choose_elements(region.elements, device)
            if not _is_stub(element := region.elements[index])
        ]
        for section in sections
        for region in section.regions
    ]
    frames = sum(f.runs_on(device) and not _is_stub(f) for s in sections for f in s.frames)
    compiled = [elements for elements in chosen if elements and not _is_machine_code(elements)]
    sources = {f"{e.kind.value} {e.arch}" for elements in compiled for e in elements}
    return LoadableCode(
        device=str(device),
        machine=frames + sum(map(_is_machine_code, chosen)),
        compiled=len(compiled),
        compiled_bytes=sum(e.stored_size for elements in compiled for e in elements),
        compiled_from=tuple(sorted(sources)),
        nothing=sum(not elements for elements in chosen),
    )


def loaded_sections(library_map: LibraryMap, device: ComputeCapability) -> Sequence[Section]:
    """The sections that a device loads code of; all of a file for linkers alone.

    Relocatable code counts if the driver links it for the device and there is nothing else: see
    ``LibraryMap.linked_anew``. Which of it a linked region names isn't known, so all of it must
    have code to link: a gate counts on no code that may be missing.
    """
    if library_map.library.file_kind.is_link_time:
        return library_map.sections
    others = [section for section in library_map.sections if section.name != RELOCATABLE]
    if (
        library_map.linked_anew(device)
        and all(can_be_linked(r.elements, device) for r in library_map.relocatable_regions)
        and not any(choose_elements(r.elements, device) for s in others for r in s.regions)
    ):
        return library_map.sections
    return others


def _is_stub(code: Element) -> bool:
    content = code.content
    return isinstance(content, Cubin) and not (content.functions or content.data)


def _is_machine_code(elements: Sequence[Element]) -> bool:
    return any(element.kind is ElementKind.CUBIN for element in elements)
