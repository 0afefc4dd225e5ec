"""Usage and maps to located libraries: which regions and frames the run loaded.

An image that was loaded from a file is the region that starts at the same file offset, so kernel
names need no guessing. An image that was found in memory alone was unpacked by the library itself
(cublasLt), or compiled at run time. Its hash tells which frame it is, if any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pytest_negativa.models.library import Cubin, LibraryMap
from pytest_negativa.models.plan import LocatedLibrary, UseMark, earliest
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
    found: defaultdict[int, list[ImageUse]] = defaultdict(list)
    for image in library_usage.images:
        found[image.offset].append(image)
    memory = {i.sha256: i for i in usage.memory_images}
    uses, hashes = {}, set()
    # A library may also hand over the cubin inside an element that isn't compressed.
    for region in library_map.iter_regions():
        starts = (region.span.start, *(e.payload.start for e in region.elements))
        if images := [image for start in starts for image in found.pop(start, ())]:
            uses[region.span.start] = _mark(images)
    for frame in library_map.iter_frames():
        # A plain cubin may be loaded from where it lies.
        images = found.pop(frame.span.start, [])
        if (digest := frame.digest) is not None:
            hashes.add(digest)
            images += [memory[digest]] if digest in memory else []
        if images:
            uses[frame.span.start] = _mark(images)
    return LocatedLibrary(
        library_map=library_map,
        uses=uses,
        usage=usage,
        changed=changed,
        unmatched=tuple(
            f"an image at offset {offset:#x}, first used in {usage.context_of(left[0].first)}"
            for offset, left in sorted(found.items())
        ),
        suspects=_suspects(
            library_map, {s: image for s, image in memory.items() if s not in hashes}
        ),
        touched=() if usage.loads_eagerly else library_usage.touched,
    )


def _mark(images: Sequence[ImageUse]) -> UseMark:
    return UseMark(
        kernels=earliest(image.kernels for image in images),
        whole=any(image.whole for image in images),
        first=min((image.first for image in images), key=lambda first: first.time_ns),
        prelinked=tuple(sorted({offset for image in images for offset in image.prelinked})),
        functions=frozenset(name for image in images for name in image.functions),
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
