"""Counts and sums of a map, for tables of libraries."""

from __future__ import annotations

from pytest_negativa.models.base import Record, Versioned
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import (
    ForeignCode,
    LibraryFile,
    LibraryMap,
    Removed,
)


class SectionRow(Record, frozen=True, kw_only=True):
    """One section with GPU code. Sizes are in bytes.

    Attributes:
        name: of the ELF section.
        size: of the section.
        regions: how many containers it holds.
        frames: how many zstd frames it holds.
        elements: how many entries its regions hold, and how much bare code besides.
        code_bytes: payloads with padding, and frames.
    """

    name: str
    size: int
    regions: int
    frames: int
    elements: int
    code_bytes: int


class CodeRow(Record, frozen=True, kw_only=True):
    """All code of one arch and kind in a library, or in several libraries.

    Attributes:
        arch: e.g. ``sm_90a``; ``sm_00`` if the code states none.
        kind: ``cubin``, ``ptx``, ``lto-ir``, ``tile-ir``, ``bitcode``, ``unknown``, or ``frame``:
            a zstd frame that holds a cubin.
        elements: number of elements or frames.
        stored_bytes: bytes in the file, with padding.
        unpacked_bytes: bytes after decompression.
        kernels: distinct kernel names in the code that was read; None if none was read.
        unreadable: number of elements that can't be read.
        loaded: number of elements that a device of the summary loads; None without devices.
        loaded_bytes: their share of ``stored_bytes``; None without devices.
    """

    arch: str
    kind: str
    elements: int
    stored_bytes: int
    unpacked_bytes: int
    kernels: int | None
    unreadable: int
    loaded: int | None
    loaded_bytes: int | None


class LibrarySummary(LibraryFile, frozen=True, kw_only=True):
    """One library in figures.

    Attributes:
        path, size, build_id, soname: see ``LibraryFile``.
        file_kind: what the file is.
        devices: the compute capabilities that ``loaded`` figures are for: what any of them loads.
            None for a file that only a linker reads.
        sections: the sections with GPU code.
        code: its code by arch and kind.
        kernels: distinct kernel names in the code that was read; None if only headers were read.
        problems: places that are not understood.
        foreign: the code for GPUs of other vendors, which is not read.
    """

    devices: tuple[str, ...]
    sections: tuple[SectionRow, ...]
    code: tuple[CodeRow, ...]
    kernels: int | None
    problems: tuple[str, ...]
    file_kind: FileKind = FileKind.LIBRARY
    foreign: tuple[ForeignCode, ...] = ()

    @property
    def regions(self) -> int:
        return sum(s.regions for s in self.sections)

    @property
    def frames(self) -> int:
        return sum(s.frames for s in self.sections)

    @property
    def elements(self) -> int:
        return sum(s.elements for s in self.sections)

    @property
    def code_bytes(self) -> int:
        """Bytes of GPU code in the file."""
        return sum(s.code_bytes for s in self.sections)

    @property
    def loaded_bytes(self) -> int | None:
        """Bytes in the file that any of ``devices`` would load; None without devices."""
        if not self.devices:
            return None
        return sum(row.loaded_bytes or 0 for row in self.code)


class LoadableCode(Record, frozen=True, kw_only=True):
    """Code of a library that a device could load.

    Regions of relocatable code, which must be linked first, count in files for linkers alone, and
    if the driver links them because there is nothing else. A bare frame counts as a region if it
    runs on the device.

    Attributes:
        device: its compute capability.
        machine: number of regions with machine code that runs there.
        compiled: number of regions that the driver would compile when it loads them (JIT).
        compiled_bytes: the PTX and LTO-IR that it would compile, as stored.
        compiled_from: the archs of that code, such as ``ptx sm_80``.
        nothing: number of regions without any code for the device.
    """

    device: str
    machine: int
    compiled: int
    compiled_bytes: int
    compiled_from: tuple[str, ...]
    nothing: int

    @property
    def is_missing(self) -> bool:
        """Whether the device can load nothing at all."""
        return not self.machine + self.compiled


class InspectedLibrary(Record, frozen=True, kw_only=True):
    """A library in the JSON output of ``negativa inspect``.

    Attributes:
        summary: the library in figures.
        map: its map, with ``--kernels`` or ``--elements``. Of a slimmed library the offsets in
            it are addresses.
        removed: what was taken out of a slimmed library; None for others.
        loadable: with ``--require-arch``, what each of the devices could load.
    """

    summary: LibrarySummary
    map: LibraryMap | None = None
    removed: Removed | None = None
    loadable: tuple[LoadableCode, ...] = ()


class Inspection(Versioned, Record, frozen=True, kw_only=True):
    """The JSON output of ``negativa inspect``.

    Attributes:
        libraries: those that could be read, in the order asked for.
        errors: one message for each file that could not be read.
    """

    libraries: tuple[InspectedLibrary, ...]
    errors: tuple[str, ...]
