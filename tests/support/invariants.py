"""What holds for every map, whatever the bytes were that it was read from."""

from __future__ import annotations

import itertools

from pytest_negativa.arch import ElementKind
from pytest_negativa.models.library import Compression, Cubin, LibraryMap, Ptx, Section
from pytest_negativa.models.spans import Span
from pytest_negativa.storage.records import decode_map, encode_record


def check_map(library_map: LibraryMap) -> None:
    """Assert that a map is sound in itself and survives its file format."""
    used: list[Span] = []
    for section in library_map.sections:
        assert section.span.end <= library_map.library.size
        used += _check_section(section)
    used.sort()
    for before, after in itertools.pairwise(used):
        assert before.end <= after.start, "two containers share bytes"
    for element in library_map.iter_code():
        assert element.stored_size <= element.payload.size
        if element.kind is ElementKind.UNKNOWN:
            assert element.unreadable
        assert element.unreadable is None or element.content is None
        if element.compression is Compression.NONE:
            assert element.unpacked_size == element.payload.size
        _check_names(library_map, element.content)
    encoded = encode_record(library_map)
    assert decode_map(encoded, "memory") == library_map


def _check_section(section: Section) -> list[Span]:
    spans = [r.span for r in section.regions] + [f.span for f in section.frames]
    for span in spans:
        assert section.span.start <= span.start < span.end <= section.span.end
    for starts in (
        [r.span.start for r in section.regions],
        [f.span.start for f in section.frames],
    ):
        assert starts == sorted(starts)
    for region in section.regions:
        position = region.span.start + 16
        for element in region.elements:
            assert element.header_offset == position
            assert element.payload.start >= position + 64
            position = element.payload.end
        assert position == region.span.end, "elements do not fill their region"
    return spans


def _check_names(library_map: LibraryMap, content: object) -> None:
    count = len(library_map.names)
    if isinstance(content, Cubin):
        indices = [
            *(f.name for f in (*content.kernels, *content.device_functions)),
            *content.externals,
            *content.data,
            *itertools.chain(*content.calls, *content.references),
            *itertools.chain(*content.address_taken, *content.indirect_calls),
        ]
    elif isinstance(content, Ptx):
        indices = [*content.kernels]
    else:
        return
    assert all(0 <= index < count for index in indices)
