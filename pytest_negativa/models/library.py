"""The map of a library, and its file: elements, kernels; which code devices load or link anew.

Names repeat a lot in GPU code: the cubins of six archs have the same mangled kernel name, which may
be hundreds of characters long. A ``LibraryMap`` holds each name once, in ``names``, and its rows
refer to it by index (``NameIndex``).
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    SmArch,
    can_be_linked,
    can_load,
    choose_elements,
)
from pytest_negativa.models.base import NonNegative, Record, Row, Versioned
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.spans import Span

# Names from fatbinary_section.h of the CUDA toolkit.
LINKED = ".nv_fatbin"
"""The section of code that programs register with the driver."""
RELOCATABLE = "__nv_relfatbin"
"""The section of code from before the device link."""

NameIndex = NonNegative
Edge = tuple[NameIndex, NameIndex]
"""A row of a call graph: a function, then what it calls or a prototype."""


class Compression(str, enum.Enum):
    """Packing of a payload; decided by flags 0x2000 (LZ4 block) and 0x8000 (zstd)."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Function(Row, frozen=True):
    """A kernel or device function, and its code in the unpacked cubin; size in bytes."""

    name: NameIndex
    offset_in_cubin: NonNegative
    code_size: NonNegative


class Cubin(Record, frozen=True, kw_only=True, tag="cubin"):
    """The device ELF inside an element or frame, as far as its tables tell.

    Attributes:
        arch: the arch in its ELF header.
        relocatable: ``ET_REL``: made before the device link, and not loadable as it is.
        kernels: entry functions, which a host program can look up and launch.
        device_functions: functions that only other device code reaches.
        externals: functions that it calls and doesn't define (relocatable cubins).
        data: ``__device__``, ``__managed__`` and ``__constant__`` variables.
        calls: direct calls: caller and callee.
        references: functions that take another's address, or launch it from the device; and it.
        address_taken: functions that a pointer may reach, with their prototypes. These are compared
            alone: ``#ii`` is NVIDIA's spelling of int(int).
        indirect_calls: functions that call through a pointer, with its prototype. Such a caller may
            reach every function of the same prototype in ``address_taken``.
        sha256: hex digest of the whole unpacked image; of frames only.
    """

    arch: SmArch
    relocatable: bool
    kernels: tuple[Function, ...]
    device_functions: tuple[Function, ...]
    externals: tuple[NameIndex, ...] = ()
    data: tuple[NameIndex, ...] = ()
    calls: tuple[Edge, ...] = ()
    references: tuple[Edge, ...] = ()
    address_taken: tuple[Edge, ...] = ()
    indirect_calls: tuple[Edge, ...] = ()
    sha256: str | None = None

    @property
    def functions(self) -> tuple[Function, ...]:
        """Kernels and device functions."""
        return (*self.kernels, *self.device_functions)


class Ptx(Record, frozen=True, kw_only=True, tag="ptx"):
    """PTX text, as far as its declarations tell.

    Attributes:
        kernels: entry functions.
    """

    kernels: tuple[NameIndex, ...]


Content = Cubin | Ptx


class Element(Record, frozen=True, kw_only=True):
    """One entry of a region, or a bare frame: the unit that a plan keeps or calls unused.

    Attributes:
        region: file offset at which its region begins; None for a frame.
        header_offset: file offset of its header; it ends where the payload begins.
        payload: file offsets of the payload with its padding.
        stored_size: bytes of the payload in use; the rest of ``payload`` is padding.
        unpacked_size: bytes of the content after decompression.
        kind, arch, compression: see there. For an unknown kind all bytes are kept.
        kind_number: as in the file.
        identifier: the name string of the header (the source file, usually), if it has one.
        content: the content that was read; None if it was not asked for, is unreadable, or of a
            kind that does not tell its kernels, such as LTO-IR.
        unreadable: why the payload can't be read; the element is kept.
    """

    header_offset: NonNegative
    payload: Span
    stored_size: NonNegative
    unpacked_size: NonNegative
    kind: ElementKind
    arch: SmArch
    compression: Compression
    kind_number: NonNegative = 0
    identifier: str | None = None
    content: Content | None = None
    unreadable: str | None = None
    region: NonNegative | None = None

    @classmethod
    def bare(
        cls,
        span: Span,
        unpacked_size: int,
        arch: SmArch,
        kind: ElementKind = ElementKind.CUBIN,
        compression: Compression = Compression.ZSTD,
        unreadable: str | None = None,
    ) -> Element:
        """Code with no fatbin around it: a zstd frame that holds a cubin, or plain code.

        Args:
            span: all of it; nothing is padding.
            arch: that the code states: a cubin's ELF header, or the target of PTX; sm_00 if none.
        """
        return cls(
            header_offset=span.start,
            payload=span,
            stored_size=span.size,
            unpacked_size=unpacked_size,
            kind=kind,
            arch=arch,
            compression=compression,
            unreadable=unreadable,
        )

    @property
    def span(self) -> Span:
        """Header and payload."""
        return Span(self.header_offset, self.payload.end)

    @property
    def is_frame(self) -> bool:
        """Whether it is a zstd frame, which the library unpacks itself."""
        return self.region is None and self.compression is Compression.ZSTD

    @property
    def is_plain(self) -> bool:
        """Whether it is machine code or PTX alone: no fatbin around it, not compressed."""
        return self.region is None and self.compression is Compression.NONE

    @property
    def anchor(self) -> int:
        """File offset at which its region begins; that of a frame itself."""
        return self.payload.start if self.region is None else self.region

    @property
    def digest(self) -> str | None:
        """SHA-256 of the unpacked cubin, if it was read and no region holds it."""
        return self.content.sha256 if isinstance(self.content, Cubin) else None

    def runs_on(self, device: ComputeCapability) -> bool:
        """Whether a device can load it, if need be compiled by the driver."""
        return can_load(self, device)


class Region(Record, frozen=True, kw_only=True):
    """One fatbin container: a 16-byte header and its elements, which fill it to the end.

    Attributes:
        span: file offsets, header included.
        elements: its entries, by offset.
    """

    span: Span
    elements: tuple[Element, ...]


class Section(Record, frozen=True, kw_only=True):
    """An ELF section that holds GPU code, or a file that is GPU code.

    Attributes:
        name: of the section; empty for a file that is GPU code.
        span: file offsets.
        vaddr: its address in the library, ``sh_addr`` of the section header.
        regions: the containers in it, by offset.
        frames: the bare frames in it, by offset.
        member: of an archive, the member that holds it.
    """

    name: str
    span: Span
    vaddr: NonNegative
    regions: tuple[Region, ...] = ()
    frames: tuple[Element, ...] = ()
    member: str | None = None

    def __post_init__(self) -> None:
        spans = itertools.chain(
            [self.span],
            (region.span for region in self.regions),
            (element.payload for region in self.regions for element in region.elements),
            (frame.span for frame in self.frames),
        )
        for start, end in spans:
            if start > end:
                raise ValueError(f"bad span [{start:#x}, {end:#x})")

    @property
    def label(self) -> str:
        """Its name for people, with the member of an archive."""
        return ":".join(filter(None, (self.member, self.name)))

    def iter_code(self) -> Iterator[Element]:
        """The elements of all regions, then the frames."""
        for region in self.regions:
            yield from region.elements
        yield from self.frames


class Removed(Record, frozen=True, kw_only=True):
    """Code that a slimmed library lacks, and the size of the GPU code that is left.

    Attributes:
        size_before: bytes of the original, if the library states it.
        gone_bytes: bytes of its sections with GPU code that are no longer in the file.
        stored_bytes: bytes in the file of the GPU code that is left.
        spare: file name of the spare that has what is gone, if there is one.
    """

    size_before: NonNegative | None
    gone_bytes: NonNegative
    stored_bytes: NonNegative
    spare: str | None = None


class ForeignCode(Record, frozen=True, kw_only=True):
    """Code for GPUs of another vendor, which is not read.

    Attributes:
        section: the ELF section that holds it.
        vendor: whose GPUs it is for.
        size: bytes in the file.
    """

    section: str
    vendor: str
    size: NonNegative


def add_foreign(found: Iterable[ForeignCode]) -> tuple[ForeignCode, ...]:
    """Add up code by section; the most of it first."""
    sizes: dict[tuple[str, str], int] = {}
    for code in found:
        key = code.section, code.vendor
        sizes[key] = sizes.get(key, 0) + code.size
    rows = (ForeignCode(section=s, vendor=v, size=size) for (s, v), size in sizes.items())
    return tuple(sorted(rows, key=lambda code: -code.size))


class LibraryFile(Record, frozen=True, kw_only=True):
    """A file with GPU code.

    Attributes:
        path: real path.
        size: bytes.
        build_id: hex of the GNU build id, if it has one.
        soname: ``DT_SONAME``, if it has one.
    """

    path: str
    size: NonNegative
    build_id: str | None
    soname: str | None


class LibraryIdentity(LibraryFile, frozen=True, kw_only=True):
    """The identity of a library: its content, never its base name.

    Attributes:
        path, size, build_id, soname: see ``LibraryFile``.
        mtime_ns: modification time, ns since the epoch.
        file_kind: what the file is.
        sha256: hex digest of the whole file. A plan is for exactly this content. None if it was
            not asked for, if there is no GPU code, or if the file changed while it was read.
    """

    mtime_ns: int
    sha256: str | None = None
    file_kind: FileKind = FileKind.LIBRARY


class Scope(Record, frozen=True, kw_only=True):
    """Parts of a library that were read beyond the headers.

    Attributes:
        devices: capabilities (``"9.0"``) whose code is unpacked; None: all.
        headers_only: nothing is unpacked, whatever ``devices`` says.
        starts: file offsets of payloads and frames; of the code for ``devices``, only these are
            unpacked. None: all of them.
        calls: call graphs were read; a plan needs them.
    """

    devices: tuple[str, ...] | None = None
    headers_only: bool = False
    starts: frozenset[NonNegative] | None = None
    calls: bool = True


class Kernel(NamedTuple):
    """A kernel by its mangled name; ``code_size`` in bytes, None for PTX (no code yet)."""

    name: str
    code_size: int | None


class CodeFinder:
    """Finds the GPU code of a library by file offset.

    Args:
        blocks: elements and frames of the library.
        regions: its regions.

    Attributes:
        blocks: by offset.
    """

    def __init__(self, blocks: Iterable[Element], regions: Iterable[Region]) -> None:
        self.blocks = sorted(blocks, key=lambda block: block.payload.start)
        self._regions = sorted(region.span for region in regions)

    def block_at(self, offset: int) -> Element | None:
        """The element or frame whose payload holds a byte."""
        at = bisect_right(self.blocks, offset, key=lambda block: block.payload.start) - 1
        return self.blocks[at] if at >= 0 and offset < self.blocks[at].payload.end else None

    def region_at(self, offset: int) -> Span | None:
        """The region that holds a byte, or else the last one before it."""
        at = bisect_right(self._regions, offset, key=lambda span: span.start) - 1
        return self._regions[at] if at >= 0 else None


class LibraryMap(Versioned, Record, frozen=True, kw_only=True):
    """All GPU code of one library: which bytes, for which arch, with which kernels.

    Attributes:
        library: which library it is.
        scope: how much of it was read.
        sections: the sections with GPU code.
        problems: places that are not understood, and so are kept: the file offset, what was found,
            and what was expected.
        names: each name once; kernels and symbols refer to it by index.
        foreign: the code for GPUs of other vendors.
    """

    library: LibraryIdentity
    scope: Scope
    sections: tuple[Section, ...]
    problems: tuple[str, ...]
    names: tuple[str, ...]
    foreign: tuple[ForeignCode, ...] = ()

    def iter_code(self) -> Iterator[Element]:
        """All GPU code, section by section; see ``Section.iter_code`` for the order."""
        for section in self.sections:
            yield from section.iter_code()

    def loaded_starts(self, devices: Iterable[ComputeCapability]) -> frozenset[int]:
        """``payload.start`` of the code that at least one of the devices loads.

        Of a region that is the driver's choice, see ``arch.choose_elements``; of the frames all
        that run there.
        """
        devices = tuple(devices)
        return frozenset(
            region.elements[index].payload.start
            for device in devices
            for region in self.iter_regions()
            for index in choose_elements(region.elements, device)
        ).union(
            frame.span.start for frame in self.iter_frames() if any(map(frame.runs_on, devices))
        )

    def needed_starts(self, devices: Iterable[ComputeCapability]) -> frozenset[int]:
        """``loaded_starts``, and the linked regions that the driver links code anew for."""
        devices = tuple(devices)
        return self.loaded_starts(devices).union(
            element.payload.start
            for device in devices
            for region in self.linked_anew(device)
            for element in region.elements
        )

    def linked_anew(self, device: ComputeCapability) -> tuple[Region, ...]:
        """The regions that may be linked ones for which the driver links relocatable code anew.

        It does so if a linked region, which names the relocatable ones, has no code for the device.
        The linked region must be there, though it may be empty. All the relocatable ones that it
        names must have code to link. Source: see ``arch.can_be_linked``.

        The map doesn't hold which region names which ones. So these are all regions without code
        for the device, if any relocatable one can be linked: rather too many than too few.
        """
        if not any(can_be_linked(r.elements, device) for r in self.relocatable_regions):
            return ()
        return tuple(
            region
            for section in self.sections
            if section.name == LINKED
            for region in section.regions
            if not choose_elements(region.elements, device)
        )

    @property
    def relocatable_regions(self) -> tuple[Region, ...]:
        """The code from before the device link."""
        return tuple(r for s in self.sections if s.name == RELOCATABLE for r in s.regions)

    def iter_regions(self) -> Iterator[Region]:
        """All regions, section by section."""
        for section in self.sections:
            yield from section.regions

    def iter_frames(self) -> Iterator[Element]:
        """All bare frames, section by section."""
        for section in self.sections:
            yield from section.frames

    def kernels_of(self, content: Content | None) -> tuple[Kernel, ...]:
        """The kernels of an element's or frame's content, in the order of its table."""
        if isinstance(content, Cubin):
            return tuple(Kernel(self.names[k.name], k.code_size) for k in content.kernels)
        if isinstance(content, Ptx):
            return tuple(Kernel(self.names[k], None) for k in content.kernels)
        return ()

    def functions_of(self, content: Content | None) -> frozenset[str]:
        """Names of the kernels of some content, and of the device functions of a cubin."""
        if isinstance(content, Cubin):
            return frozenset(self.names[f.name] for f in content.functions)
        return frozenset(kernel.name for kernel in self.kernels_of(content))
