"""Usage and maps to located libraries: which regions and frames the run loaded.

An image that was loaded from a file is the region that starts at the same file offset, so kernel
names need no guessing. An image that was found in memory alone was unpacked by the library itself
(cublasLt), or compiled at run time. Its hash tells which frame it is, if any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_negativa.models.library import Cubin, LibraryMap, Region
from pytest_negativa.models.located import LocatedLibrary, UseMark, earliest
from pytest_negativa.models.trace import (
    ImageUse,
    LibraryUsage,
    Usage,
)


def locate_library(
    library_map: LibraryMap,
    library_usage: LibraryUsage,
    usage: Usage,
    changed: str | None = None,
) -> LocatedLibrary:
    """Mark in ``library_map`` what a run used of it.

    Args:
        library_map: of the library.
        library_usage: the uses of its content, see ``planning.contents``.
        usage: of the run.
        changed: see ``LocatedLibrary``.
    """
    if not library_map.scope.calls:
        raise ValueError(f"{library_map.library.path}: a plan needs the call graphs")
    marks: dict[int, list[UseMark]] = {}
    for found in library_usage.images:
        marks.setdefault(found.offset, []).append(_mark(found))
    memory = {i.sha256: i for i in usage.memory_images}
    uses = {r.span.start: m for r in library_map.iter_regions() if (m := _take(marks, r))}
    hashes = set()
    for frame in library_map.iter_frames():
        # A plain cubin may be loaded from where it lies.
        if (found_there := marks.pop(frame.span.start, None)) is not None:
            uses[frame.span.start] = _united(found_there)
        if (digest := frame.digest) is not None:
            hashes.add(digest)
            if (image := memory.get(digest)) is not None:
                seen = uses.get(frame.span.start)
                uses[frame.span.start] = _united([*([seen] if seen else []), _mark(image)])
    return LocatedLibrary(
        library_map=library_map,
        uses=uses,
        contexts=usage.contexts,
        changed=changed,
        unmatched=tuple(
            f"an image at offset {offset:#x}, first used in {usage.context_of(left[0].first)}"
            for offset, left in sorted(marks.items())
        ),
        suspects=_suspects(
            library_map, {s: image for s, image in memory.items() if s not in hashes}
        ),
        touched=() if usage.loads_eagerly else library_usage.touched,
    )


def _take(marks: dict[int, list[UseMark]], region: Region) -> UseMark | None:
    """The mark of ``region``, taken out of ``marks``.

    Usually the region as a whole. A library may also hand over the cubin inside an element
    that isn't compressed.
    """
    starts = (region.span.start, *(e.payload.start for e in region.elements))
    uses = [mark for start in starts for mark in marks.pop(start, ())]
    return _united(uses) if uses else None


def _united(uses: Sequence[UseMark]) -> UseMark:
    return UseMark(
        kernels=earliest(u.kernels for u in uses),
        whole=any(u.whole for u in uses),
        first=min((u.first for u in uses), key=lambda first: first.time_ns),
        prelinked=tuple(sorted({offset for u in uses for offset in u.prelinked})),
        functions=frozenset().union(*(u.functions for u in uses)),
    )


def _mark(use: ImageUse) -> UseMark:
    return UseMark(
        kernels=use.kernels,
        whole=use.whole,
        first=use.first,
        prelinked=use.prelinked,
        functions=frozenset(use.functions),
    )


def _suspects(library_map: LibraryMap, memory: Mapping[str, ImageUse]) -> dict[int, ImageUse]:
    """Elements that may be the origin of an image found in memory alone.

    A library can unpack an element and hand the driver the result, as cublasLt does with its
    frames. A program can read a region from the file. Hashing everything for that would cost as
    much as unpacking it again. So an element is a suspect if it, or its region, has the size of the
    image and all kernels that were looked up.

    Args:
        memory: images that are no frames, by digest.
    """
    suspects: dict[int, ImageUse] = {}
    if not memory:
        return suspects
    sizes = {image.size for image in memory.values()}
    for region in library_map.iter_regions():
        found = [(region.elements, region.span.size)] if region.span.size in sizes else []
        found += [((e,), e.unpacked_size) for e in region.elements if e.unpacked_size in sizes]
        for elements, of_size in found:
            contents = [e.content for e in elements if isinstance(e.content, Cubin)]
            names = {k.name for content in contents for k in library_map.kernels_of(content)}
            for image in memory.values():
                if contents and image.size == of_size and image.kernels.keys() <= names:
                    suspects.update(dict.fromkeys((e.header_offset for e in elements), image))
    return suspects
