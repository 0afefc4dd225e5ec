"""One library to its map: limits of unpacking, AMD's and Intel's code, what slimming has left.

Files that are GPU code themselves, objects and archives have maps, too: see ``gpucode.files``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection

from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability, ElementKind, choose_elements
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.elf import HostElf, HostSection, read_host_elf
from pytest_negativa.gpucode.fatbin import is_removed
from pytest_negativa.gpucode.files import read_bare_code
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import MAX_UNPACKED_SIZE, PayloadError, unpack
from pytest_negativa.gpucode.ptx import parse_ptx
from pytest_negativa.gpucode.scan import FATBIN_SECTIONS, Problems, iter_containers
from pytest_negativa.gpucode.slimmed import AddressSpace, read_marker, whole_sections
from pytest_negativa.gpucode.source import ByteSource, Readable
from pytest_negativa.models.file_kinds import is_spare
from pytest_negativa.models.library import (
    Compression,
    Content,
    Element,
    ForeignCode,
    LibraryIdentity,
    LibraryMap,
    Region,
    Removed,
    Scope,
    Section,
)
from pytest_negativa.models.spans import Span

# Code in libtorch_cuda.so unpacks to at most 207 times its size; zstd could reach 30,000 times.
# Bytes beyond the usual ratio, added up over a library, have a limit.
_USUAL_RATIO = 256
_MAX_EXCESS = 2 * MAX_UNPACKED_SIZE
# Begin the names of sections. clang's CGCUDANV.cpp names the first, and clang-offload-wrapper of
# Intel's DPC++ the others, by target: spir64 (SPIR-V), spir64_gen and spir64_x86_64 (compiled).
_FOREIGN_SECTIONS = {
    ".hip_fatbin": "AMD",
    "__CLANG_OFFLOAD_BUNDLE__sycl-amdgcn": "AMD",
    "__CLANG_OFFLOAD_BUNDLE__sycl-spir64": "Intel",
}
# What slim takes out of libraries with a spare besides GPU code; see rewriting/compact/cut.py.
_HOST_SECTION = re.compile(r"\.(text|l?rodata|data|eh_frame(_hdr)?|gcc_except_table)\b")
_IS_SPARE = (
    "is a spare of negativa slim --spare, with parts of a library; negativa slim undo gives the "
    "original back"
)


def read_library(path: str | os.PathLike[str], scope: Scope) -> LibraryMap:
    """Read all GPU code of a library.

    Damage inside GPU code is no error: the map marks the element as unreadable, or a ``Problem``
    tells where, and the rest is read.

    Args:
        scope: the code that is unpacked.

    Raises:
        FormatError: the file is no ELF file of a 64-bit little-endian host, or damaged beyond its
            GPU code.
    """
    with ByteSource(path) as source:
        return map_library(source, read_host_elf(source), scope)


def has_gpu_code(source: ByteSource) -> bool:
    """Whether a library has GPU code; stops at the first.

    Raises:
        FormatError: see ``read_library``.
    """
    sections = read_host_elf(source).sections
    found = (
        next(iter_containers(source, section, Problems()), None)
        for section in sorted(sections, key=lambda s: s.name not in FATBIN_SECTIONS)
    )
    return any(container is not None for container in found)


def map_library(source: ByteSource, host: HostElf, scope: Scope) -> LibraryMap:
    """``read_library`` for a library that is open.

    Raises:
        FormatError: the file can't be read, or got shorter; or it is a spare, which has only parts
            of a library.
    """
    if is_spare(source.path):
        raise FormatError(source.path, None, _IS_SPARE)
    reader = _Reader(source, scope)
    for offset, text in host.faults:
        reader.problems.add(offset, text)
    sections = tuple(filter(None, map(reader.read_section, host.sections)))
    return reader.library_map(source, host, sections)


def add_contents(source: ByteSource, library_map: LibraryMap, scope: Scope) -> LibraryMap:
    """Read what a wider scope unpacks, into a map of headers; the library is not searched again.

    Raises:
        FormatError: the file can't be read, or got shorter.
    """
    reader = _Reader(source, scope)
    sections = tuple(
        replace(
            section,
            regions=tuple(map(reader.read_region, section.regions)),
            frames=tuple(map(reader.read_frame, section.frames)),
        )
        for section in library_map.sections
    )
    return replace(library_map, scope=scope, sections=sections, names=reader.names.names())


def map_slimmed(source: ByteSource, host: HostElf, scope: Scope) -> tuple[LibraryMap, Removed]:
    """Read the GPU code that is left in a slimmed library, and how much is gone.

    All offsets of the map are addresses (of sections, ``vaddr``). It does not list elements that
    were taken out, so regions have holes. It is for people to read: no plan can be made of it.
    Code of which any byte is in a spare counts as taken out. Rests of it are not understood, and
    are no problem.

    Raises:
        FormatError: see ``read_library``; or the segments and sections don't fit together.
    """
    marker = read_marker(source, host)
    space = AddressSpace(source, host.segments, host.zeros)

    def is_whole(span: Span) -> bool:
        return marker.spare is None or space.stored_size(*span) == span.size

    reader = _Reader(space, scope, is_whole)
    whole = {section: reader.read_section(section) for section in whole_sections(space, host)}
    left = tuple(_without_removed(found, is_whole) for found in whole.values() if found)
    removed = Removed(
        size_before=marker.size_before,
        gone_bytes=sum(
            section.size - space.stored_size(section.vaddr, section.vaddr + section.size)
            for section, found in whole.items()
            if found or marker.spare is None or not _HOST_SECTION.match(section.name)
        ),
        stored_bytes=sum(
            space.stored_size(block.payload.start, block.payload.end)
            for section in left
            for block in section.iter_code()
        ),
        spare=marker.spare,
    )
    library_map = reader.library_map(source, host, left)
    return library_map if marker.spare is None else replace(library_map, problems=()), removed


def _without_removed(section: Section, is_whole: Callable[[Span], bool]) -> Section:
    return replace(
        section,
        regions=tuple(
            replace(
                region,
                elements=tuple(
                    e for e in region.elements if not is_removed(e) and is_whole(e.payload)
                ),
            )
            for region in section.regions
        ),
        frames=tuple(frame for frame in section.frames if is_whole(frame.span)),
    )


class _Reader:
    """Reads the sections of one library; collects names and problems."""

    def __init__(
        self, source: Readable, scope: Scope, is_whole: Callable[[Span], bool] = lambda _: True
    ) -> None:
        self._source = source
        self._scope = scope
        self._is_whole = is_whole
        self._devices = (
            None if scope.devices is None else [*map(ComputeCapability.parse, scope.devices)]
        )
        self.names = NameTable()
        self.problems = Problems()
        self._excess_left = _MAX_EXCESS

    def library_map(
        self, source: ByteSource, host: HostElf, sections: tuple[Section, ...]
    ) -> LibraryMap:
        """Make the map, once all sections are read."""
        return LibraryMap(
            library=LibraryIdentity(
                path=source.path,
                size=source.size,
                mtime_ns=source.mtime_ns,
                build_id=host.build_id,
                soname=host.soname,
                file_kind=host.kind,
            ),
            scope=self._scope,
            sections=sections,
            problems=tuple(self.problems),
            names=self.names.names(),
            foreign=tuple(
                ForeignCode(section=section.name, vendor=vendor, size=section.size)
                for section in host.sections
                for prefix, vendor in _FOREIGN_SECTIONS.items()
                if section.name.startswith(prefix)
            ),
        )

    def read_section(self, host: HostSection) -> Section | None:
        """Read the GPU code in a section; None if it has none."""
        regions: list[Region] = []
        frames: list[Element] = []
        whole = read_bare_code(self._source, host)
        for found in (whole,) if whole else iter_containers(self._source, host, self.problems):
            if isinstance(found, Region):
                regions.append(self.read_region(found))
            else:
                frames.append(self.read_frame(found))
        if not regions and not frames:
            return None
        return Section(
            name=host.name,
            member=host.member,
            span=Span(host.offset, host.offset + host.size),
            vaddr=host.vaddr,
            regions=tuple(regions),
            frames=tuple(frames),
        )

    def read_region(self, region: Region) -> Region:
        """Read what the scope unpacks of a region."""
        wanted = self._wanted(region)
        if not wanted:
            return region
        return replace(
            region,
            elements=tuple(
                self._read_element(element) if index in wanted else element
                for index, element in enumerate(region.elements)
            ),
        )

    def _wanted(self, region: Region) -> Collection[int]:
        if self._scope.headers_only:
            return ()
        starts = self._scope.starts
        if starts is not None and not any(e.payload.start in starts for e in region.elements):
            return ()
        found: Collection[int] = range(len(region.elements))
        if self._devices is not None:
            found = {i for d in self._devices for i in choose_elements(region.elements, d)}
        if starts is not None:
            found = {i for i in found if region.elements[i].payload.start in starts}
        return found

    def _read_element(self, element: Element, *, digest: bool = False) -> Element:
        is_silent = element.kind.is_opaque or element.kind is ElementKind.LTO_IR
        if element.unreadable is not None or is_silent or not self._is_whole(element.payload):
            return element
        try:
            return replace(element, content=self._read_content(element, digest=digest))
        except PayloadError as e:
            return replace(element, unreadable=str(e))

    def _read_content(self, element: Element, *, digest: bool) -> Content:
        content = self._unpack(
            Span(element.payload.start, element.payload.start + element.stored_size),
            element.compression,
            element.unpacked_size,
        )
        if element.kind is ElementKind.PTX:
            return parse_ptx(content, self.names)
        return parse_cubin(content, self.names, digest=digest, calls=self._scope.calls)

    def _unpack(self, stored: Span, compression: Compression, promised_size: int) -> bytes:
        # Holes of a sparse file take no room on disk, so the stored size needs a limit, too.
        if max(stored.size, promised_size) > MAX_UNPACKED_SIZE:
            raise PayloadError(
                f"promises {promised_size:,} bytes unpacked of {stored.size:,}, more than the "
                f"limit of {MAX_UNPACKED_SIZE:,}"
            )
        excess = max(0, promised_size - stored.size * _USUAL_RATIO)
        if excess > self._excess_left:
            raise PayloadError(
                f"promises {promised_size:,} bytes unpacked of {stored.size:,}, like others "
                "before; taken for a decompression bomb"
            )
        self._excess_left -= excess
        return unpack(self._source.read(stored.start, stored.size), compression, promised_size)

    def read_frame(self, frame: Element) -> Element:
        """Read a frame, if the scope unpacks it."""
        is_wanted = self._devices is None or any(map(frame.runs_on, self._devices))
        if self._scope.headers_only or not is_wanted:
            return frame
        if self._scope.starts is not None and frame.span.start not in self._scope.starts:
            return frame
        # The library unpacks the frame itself and hands the driver the image. A trace knows the
        # image by its hash alone.
        return self._read_element(frame, digest=True)
