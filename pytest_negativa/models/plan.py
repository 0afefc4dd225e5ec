"""Plans: decisions on elements and frames, each with its KeepReason or UnusedReason.

And a library's map with what the run used of it: between trace and plan.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from pytest_negativa.models.base import NonNegative, Record, Row, Versioned
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import Element, LibraryIdentity, LibraryMap
from pytest_negativa.models.spans import Span, size
from pytest_negativa.models.trace import Context, FirstUse, ImageUse, TracedLibrary, Usage


class KeepReason(str, enum.Enum):
    """Why bytes are not touched; ``planning.decide`` has the order in which reasons are tried."""

    INCOMPLETE = "incomplete"  # more may have been used than is known
    CHANGED = "changed"  # the library is not the one that was traced
    UNMATCHED = "unmatched"  # an image was loaded from it that the map doesn't have
    LIBRARY_POLICY = "library-policy"  # keep.libraries
    UNREADABLE = "unreadable"  # damaged, or of an unknown kind
    LOADED = "loaded"  # loaded by the run, from its region
    MEMORY_IMAGE = "memory-image"  # loaded by the run, unpacked by the library itself
    TOUCHED = "touched"  # read by a process, and no call of the driver shows why
    PLAIN_CUBIN = "plain-cubin"  # in the data of a library, which may read it itself
    RELOCATABLE = "relocatable"  # device code that the driver may have to link
    ARCH_POLICY = "arch-policy"  # keep.archs
    PTX_POLICY = "ptx-policy"  # keep.ptx
    KERNEL_POLICY = "kernel-policy"  # keep.kernels
    HOOK = "hook"  # a plugin asked for it
    HEALED = "healed"  # verification failed without it
    MISSED = "missed"  # slimmed with a spare, a process needed it


class UnusedReason(str, enum.Enum):
    """Why bytes are dead weight: the paper's reasons I and II, and one inside kept cubins."""

    WRONG_ARCH = "wrong-arch"  # no traced device loads it
    NO_USED_KERNEL = "no-used-kernel"  # a traced device would, but nothing asked for it
    UNREACHABLE_KERNEL = "unreachable-kernel"  # its cubin is loaded, it is never run
    NOT_OPENED = "not-opened"  # a file that is GPU code, and no process opened it


class Decision(Row, frozen=True):
    """What becomes of an element's payload, or of a frame: ``[start, end, kept, reason, detail]``.

    Attributes:
        start, end: file offsets of the bytes in question, padding included.
        kept: whether they stay as they are.
        reason: a ``KeepReason`` or ``UnusedReason``, as its value.
        detail: more of the reason, for people: the test that needed it, the glob that names it; of
            a file that is GPU code, its path below the site.
    """

    start: NonNegative
    end: NonNegative
    kept: bool
    reason: str
    detail: str | None = None

    @property
    def size(self) -> int:
        return self.end - self.start


class KernelUse(Row, frozen=True):
    """A used kernel: ``[name, first]``.

    Attributes:
        name: mangled.
        first: the test, or the phase of the session, that used it first.
    """

    name: str
    first: Context


class TrimmedCubin(Record, frozen=True, kw_only=True):
    """A cubin that is kept, and the code in it that is unused.

    Attributes:
        start: file offset of the payload or frame, that of its ``Decision``.
        kept: mangled names of the functions that stay, sorted.
        code_size: bytes of all its functions, unpacked.
        unused: code of the others, unpacked; sorted and disjoint, a function or more each.
        reason: why it is unused.
    """

    start: NonNegative
    kept: tuple[str, ...]
    code_size: NonNegative
    unused: tuple[Span, ...]
    reason: UnusedReason = UnusedReason.UNREACHABLE_KERNEL

    @property
    def unused_size(self) -> int:
        """Bytes of unused code in the unpacked cubin."""
        return size(self.unused)


class LibraryPlan(Versioned, Record, frozen=True, kw_only=True):
    """The decisions for one library, one for each element and frame, by offset.

    Attributes:
        devices: compute capabilities that the run was traced on.
        used_kernels: the kernels of the library that the run used and those devices could load,
            by mangled name.
        unused_kernels: mangled names of the others that those devices could load; sorted.
        notes: what a reader of the report should know of this library.
        trimmed: kept cubins with unused code in them, by offset; empty at element granularity.
        granularity: ``element`` or ``kernel``.
    """

    library: LibraryIdentity
    devices: tuple[str, ...]
    decisions: tuple[Decision, ...]
    used_kernels: tuple[KernelUse, ...]
    unused_kernels: tuple[str, ...]
    notes: tuple[str, ...] = ()
    trimmed: tuple[TrimmedCubin, ...] = ()
    granularity: str = "element"

    @property
    def is_files(self) -> bool:
        """Whether it is for the files of a distribution that are GPU code, see ``map_files``."""
        return self.library.file_kind is FileKind.FILES

    @property
    def code_bytes(self) -> int:
        """Bytes of all elements and frames in the file."""
        return sum(d.size for d in self.decisions)

    @property
    def unused_bytes(self) -> int:
        """Bytes of the unused elements and frames in the file."""
        return sum(d.size for d in self.decisions if not d.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the elements and frames that stay."""
        return self.code_bytes - self.unused_bytes


class UseMark(Record, frozen=True, kw_only=True):
    """Use of a region or frame by the run.

    Attributes:
        kernels: the kernels that were looked up, by mangled name.
        whole: all its kernels count as used, see ``ImageUse.whole``.
        first: where the image was first seen.
        prelinked: file offsets of the relocatable regions that the driver could link this one from.
        functions: mangled names of device functions whose address the program looked up.
    """

    kernels: Mapping[str, FirstUse]
    whole: bool
    first: FirstUse
    prelinked: tuple[int, ...] = ()
    functions: frozenset[str] = frozenset()


class LocatedLibrary(Record, frozen=True, kw_only=True):
    """A library with its use.

    Attributes:
        uses: what the run used, by the file offset at which the region or frame begins.
        usage: of the run.
        changed: why this is not the library that was traced; None if it is.
        unmatched: images that the run loaded from the library and that its map doesn't explain.
        suspects: images that were found in memory and may be the content of an element, by its
            header offset.
        touched: pages that were read, see ``LibraryUsage``; none if headers of all regions were.
    """

    library_map: LibraryMap
    uses: Mapping[int, UseMark]
    usage: Usage
    changed: str | None
    unmatched: tuple[str, ...]
    suspects: Mapping[int, ImageUse]
    touched: tuple[Span, ...] = ()

    def use_of(self, block: Element) -> UseMark | None:
        """Use of an element's region, or of a frame; None: not used."""
        return self.uses.get(block.anchor)


def may_be(traced: TracedLibrary, library: LibraryIdentity) -> bool:
    """Whether a traced file had the content of a library, by digest or else size and build id."""
    if traced.sha256 is not None and library.sha256 is not None:
        return traced.sha256 == library.sha256
    return (traced.size, traced.build_id) == (library.size, library.build_id)


def earliest(uses: Iterable[Mapping[str, FirstUse]]) -> dict[str, FirstUse]:
    """All kernels of ``uses``, each with the earliest of its first uses."""
    found: dict[str, FirstUse] = {}
    for kernels in uses:
        for name, first in kernels.items():
            if name not in found or first.time_ns < found[name].time_ns:
                found[name] = first
    return found
