"""Used regions and frames by digest; changed libraries; those that only samples loaded stay.

An image that was loaded from a file is the region that starts at the same file offset, so kernel
names need no guessing. An image that was found in memory alone was unpacked by the library itself
(cublasLt), or compiled at run time. Its hash tells which frame it is, if any.

A library is known by its SHA-256, under any path that a process had it at. A file that is gone was
hashed only if it was still there when a run ended. Otherwise its size and build id stand in for the
digest. A path and a modification time say nothing: two libraries may share them, and a copy or a
new installation has others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.models.library import Cubin, LibraryMap
from pytest_negativa.models.plan import LocatedLibrary, UseMark, earliest
from pytest_negativa.models.spans import common, union
from pytest_negativa.models.trace import (
    ImageUse,
    LibraryUsage,
    Role,
    TracedLibrary,
    Usage,
)

_ONLY_SAMPLED = (
    "only samples of processes outside of tests used it; combine them with a run of the tests"
)


class Content(NamedTuple):
    """The uses of a library's content in a run.

    Attributes:
        usage: the uses of it, under any path. An offset may have several images.
        changed: why more of it may have been used, in words; None if that is all.
        lack: why others may use more of it; None if all was traced.
    """

    usage: LibraryUsage
    changed: str | None
    lack: str | None


class Contents:
    """The files of a run, and the libraries that lie at their paths now.

    Args:
        usage: of the run.
        present: what lies there, with digests.

    Attributes:
        usage: with the digests of the files that did not change since they were mapped.
    """

    def __init__(self, usage: Usage, present: Iterable[TracedLibrary] = ()) -> None:
        self._present = {library.path: library for library in present}
        found = (replace(used, library=self._with_digest(used.library)) for used in usage.libraries)
        self.usage = replace(usage, libraries=tuple(found))
        self._by_path: defaultdict[str, list[LibraryUsage]] = defaultdict(list)
        self._by_size: defaultdict[int | None, list[LibraryUsage]] = defaultdict(list)
        for used in self.usage.libraries:
            self._by_path[used.library.path].append(used)
            self._by_size[used.library.size].append(used)
        self._samples = {
            number
            for number, process in enumerate(usage.processes)
            if process.header.role is Role.SAMPLE
        }

    def of(self, library: TracedLibrary) -> Content:
        """The uses of a library that lies there now, and whether these are all."""
        found = [(used, _is_same(used.library, library)) for used in self._by_size[library.size]]
        same = [used for used, is_same in found if is_same]
        unknown = [used for used, is_same in found if is_same is None]
        # What they used outside of their traces may be of this library.
        processes = {p for used in (*same, *unknown, *self._by_size[None]) for p in used.processes}
        usage = LibraryUsage(
            library=library,
            images=tuple(image for used in same for image in used.images),
            processes=tuple(sorted(processes)),
            touched=union(page for used in same for page in used.touched),
            untouched=() if unknown else common(used.untouched for used in same),
        )
        paths = {library.path: None, **{used.library.path: None for used in same}}
        why = (
            *self._others_at(paths, library),
            *(
                f"{used.library.path} was written or removed since GPU code was loaded from it, so "
                "whether it was this library is unknown"
                for used in unknown
                if used.images
            ),
        )
        return Content(usage, next(iter(why), None), self._why_only_sampled(same))

    def _why_only_sampled(self, same: Iterable[LibraryUsage]) -> str | None:
        """The reason against a library that no process of a whole run had loaded."""
        numbers = {number for used in same for number in used.processes}
        return _ONLY_SAMPLED if numbers and numbers <= self._samples else None

    def _with_digest(self, traced: TracedLibrary) -> TracedLibrary:
        present = self._present.get(traced.path)
        if traced.sha256 is not None or present is None or traced.state is None:
            return traced
        return replace(traced, sha256=present.sha256) if present.state == traced.state else traced

    def _others_at(self, paths: Iterable[str], library: TracedLibrary) -> Iterator[str]:
        """Say if a path of a library has, or had, another content."""
        for path in paths:
            others = [used.library for used in self._by_path[path] if used.library.size is not None]
            if path in self._present:
                others.append(self._present[path])
            for other in others:
                if _is_same(other, library) is False:
                    yield (
                        f"two libraries were at {path}: {_describe(other)}, and "
                        f"{_describe(library)}"
                    )


def _is_same(traced: TracedLibrary, library: TracedLibrary) -> bool | None:
    """Whether a file of the run had the content of a library; None if it isn't known."""
    if traced.sha256 is not None and library.sha256 is not None:
        return traced.sha256 == library.sha256
    if traced.size is None:
        return None
    if (traced.size, traced.build_id) != (library.size, library.build_id):
        return False
    if traced.build_id is None or _was_written_in_place(traced, library):
        return None
    return True


def _describe(library: TracedLibrary) -> str:
    known = {"build id": library.build_id, "SHA-256": library.sha256}
    return " ".join(
        (f"{library.size:,} bytes", *(f"{name} {value}" for name, value in known.items() if value))
    )


def _was_written_in_place(traced: TracedLibrary, library: TracedLibrary) -> bool:
    """Whether the file that a process had mapped was written to; a renamed one takes its place."""
    return (
        traced.path == library.path
        and traced.inode is not None
        and (traced.device, traced.inode) == (library.device, library.inode)
        and traced.mtime_ns != library.mtime_ns
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
        library_usage: the uses of its content, see ``Contents``.
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
