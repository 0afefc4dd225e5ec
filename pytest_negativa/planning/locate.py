"""Usage and maps to located libraries: which regions and frames the run loaded.

An image that was loaded from a file is a region that starts at the same file offset, so no
guessing by kernel name is needed. An image that was found in memory alone was unpacked by the
library itself (cublasLt) or compiled at run time: its hash tells which frame it is, if any.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_negativa.models.library import Cubin, Frame, LibraryMap, Region
from pytest_negativa.models.located import (
    LocatedFrame,
    LocatedLibrary,
    LocatedRegion,
    UseMark,
)
from pytest_negativa.models.trace import (
    DataKind,
    ImageUse,
    LibraryUsage,
    MemoryImage,
    TracedLibrary,
    Usage,
)


def locate_library(
    library_map: LibraryMap, library_usage: LibraryUsage, usage: Usage
) -> LocatedLibrary:
    """Mark in ``library_map`` what ``usage`` says of it."""
    marks = {i.offset: _mark(i.use, usage, i.prelinked) for i in library_usage.images}
    memory = {i.sha256: i for i in usage.memory_images}
    regions = tuple(
        LocatedRegion(region=region, section=section.name, use=_take(marks, region))
        for section in library_map.sections
        for region in section.regions
    )
    frames = tuple(
        LocatedFrame(frame=frame, use=_frame_use(frame, memory, usage))
        for frame in library_map.iter_frames()
    )
    return LocatedLibrary(
        library_map=library_map,
        regions=regions,
        frames=frames,
        changed=_difference(library_usage.library, library_map),
        unmatched=tuple(
            f"an image at offset {offset:#x}, first used in {mark.first_use}"
            for offset, mark in sorted(marks.items())
        ),
        suspects=_suspects(library_map, usage, memory),
    )


def _take(marks: dict[int, UseMark], region: Region) -> UseMark | None:
    """What was loaded from ``region``; taken out of ``marks``.

    Usually the region as a whole. A library may also hand over the cubin inside an element
    that isn't compressed.
    """
    found = [marks.pop(region.span.start, None)]
    found += [marks.pop(e.payload.start, None) for e in region.elements]
    uses = [mark for mark in found if mark is not None]
    if not uses:
        return None
    return UseMark(
        kernels=frozenset().union(*(u.kernels for u in uses)),
        whole=any(u.whole for u in uses),
        first_use=uses[0].first_use,
        prelinked=tuple(sorted({offset for u in uses for offset in u.prelinked})),
        functions=frozenset().union(*(u.functions for u in uses)),
    )


def _mark(use: ImageUse, usage: Usage, prelinked: tuple[int, ...] = ()) -> UseMark:
    return UseMark(
        kernels=frozenset(k.name for k in use.kernels),
        whole=use.whole,
        first_use=describe_context(usage, use.first.context),
        prelinked=prelinked,
        functions=frozenset(d.name for d in use.data if d.kind is DataKind.UNIFIED_FUNCTION),
    )


def describe_context(usage: Usage, index: int) -> str:
    """A context for people: ``tests/test_a.py::test_b (call)``, or its phase."""
    context = usage.contexts[index]
    if context.nodeid is None:
        return context.phase.value if context.detail is None else context.detail
    return f"{context.nodeid} ({context.phase.value})"


def _frame_use(frame: Frame, memory: Mapping[str, MemoryImage], usage: Usage) -> UseMark | None:
    content = frame.content
    if content is None or content.sha256 is None or content.sha256 not in memory:
        return None
    return _mark(memory[content.sha256].use, usage)


def _suspects(
    library_map: LibraryMap, usage: Usage, memory: Mapping[str, MemoryImage]
) -> dict[int, str]:
    """Elements that may be the origin of an image found in memory alone.

    A library can unpack an element and hand the driver the result, as cublasLt does with its
    frames. Hashing every element for that would cost as much as unpacking it again; size and
    kernels tell as much: an image of the same size that has all kernels looked up.
    """
    hashes = {f.content.sha256 for f in library_map.iter_frames() if f.content is not None}
    wanted = [
        (image.size, {k.name for k in image.use.kernels}, _mark(image.use, usage).first_use)
        for sha256, image in memory.items()
        if sha256 not in hashes and image.use.kernels
    ]
    suspects: dict[int, str] = {}
    if not wanted:
        return suspects
    sizes = {size for size, _, _ in wanted}
    for element in library_map.iter_elements():
        if element.unpacked_size not in sizes or not isinstance(element.content, Cubin):
            continue
        names = {k.name for k in library_map.kernels_of(element.content)}
        for size, kernels, first_use in wanted:
            if size == element.unpacked_size and kernels <= names:
                suspects[element.header_offset] = first_use
    return suspects


def _difference(traced: TracedLibrary, library_map: LibraryMap) -> str | None:
    """Why the library is no longer the one that was traced; None if nothing speaks for it."""
    found = library_map.library
    if traced.size is not None and traced.size != found.size:
        return f"{found.size:,} bytes, {traced.size:,} when it was traced"
    if traced.build_id != found.build_id:
        return f"build id {found.build_id}, {traced.build_id} when it was traced"
    # With equal build ids, another time is another installation of the same file.
    if traced.build_id is None and traced.mtime_ns not in (None, found.mtime_ns):
        return "written again since it was traced, and it has no build id"
    return None
