"""A library's map with what the run used of it marked: between trace and plan."""

from __future__ import annotations

from pytest_negativa.models.base import Record
from pytest_negativa.models.library import Frame, LibraryMap, Region


class UseMark(Record, frozen=True, kw_only=True):
    """What the run did with a region or frame.

    Attributes:
        kernels: mangled names that were looked up.
        whole: all its kernels count as used, see ``ImageUse.whole``.
        first_use: where that was first seen, for people: a test's node id and phase.
        prelinked: file offsets of the relocatable regions that the driver could link this one from.
        functions: mangled names of device functions whose address the program looked up.
    """

    kernels: frozenset[str]
    whole: bool
    first_use: str
    prelinked: tuple[int, ...] = ()
    functions: frozenset[str] = frozenset()


class LocatedRegion(Record, frozen=True, kw_only=True):
    """A region; ``use`` is None where the run loaded nothing from it."""

    region: Region
    section: str
    use: UseMark | None


class LocatedFrame(Record, frozen=True, kw_only=True):
    """A frame; ``use`` is None where the run loaded no image of its content."""

    frame: Frame
    use: UseMark | None


class LocatedLibrary(Record, frozen=True, kw_only=True):
    """A library with its use.

    Attributes:
        changed: why this is not the library that was traced, if it isn't.
        unmatched: images that were loaded from it and that its map doesn't explain.
        suspects: elements and frames whose content may be an image that was found in memory;
            by header offset (elements) or start (frames), with the first use.
    """

    library_map: LibraryMap
    regions: tuple[LocatedRegion, ...]
    frames: tuple[LocatedFrame, ...]
    changed: str | None
    unmatched: tuple[str, ...]
    suspects: dict[int, str]

    @property
    def used_kernels(self) -> frozenset[str]:
        marks = [r.use for r in self.regions] + [f.use for f in self.frames]
        return frozenset().union(*(m.kernels for m in marks if m is not None))
