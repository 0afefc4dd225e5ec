"""Counts what a device could load of a library, for ``inspect``; no plan asks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_negativa.arch import ComputeCapability, ElementKind, can_be_linked, choose_elements
from pytest_negativa.models.library import (
    RELOCATABLE,
    Cubin,
    Element,
    LibraryMap,
    Section,
)
from pytest_negativa.models.summary import LoadableCode


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
    return LoadableCode(
        device=str(device),
        machine=frames + sum(map(_is_machine_code, chosen)),
        compiled=len(compiled),
        compiled_bytes=sum(e.stored_size for elements in compiled for e in elements),
        compiled_from=tuple(dict.fromkeys(sorted(_sources(compiled)))),
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
    return isinstance(content, Cubin) and not (
        content.kernels or content.device_functions or content.global_data or content.constant_data
    )


def _is_machine_code(elements: Sequence[Element]) -> bool:
    return any(element.kind is ElementKind.CUBIN for element in elements)


def _sources(compiled: Sequence[Sequence[Element]]) -> Iterator[str]:
    for elements in compiled:
        for element in elements:
            yield f"{element.kind.value} {element.arch}"
