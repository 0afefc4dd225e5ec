"""Slimmed libraries: the marker (``.negativa``), bytes by address, holes as zeros.

``negativa slim`` writes a section ``.negativa`` into them, the marker, and takes pages out of the
file. All addresses stay, and the addresses of the pages that are gone read as zeros. With a spare
they are free, between segments. A section that lost pages has no bytes and a name with a prefix.
Each run of its pages that stay is a section of the old name. File offsets say little here, so
``AddressSpace`` works with addresses.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf, HostSection, read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_LOAD, ProgramHeader
from pytest_negativa.gpucode.scan import FATBIN_SECTIONS
from pytest_negativa.gpucode.source import ByteSource, read_fact
from pytest_negativa.models.base import UNDECODABLE, NonNegative, Record, Versioned
from pytest_negativa.models.spans import covers, union

SLIMMED = (
    "slimmed by negativa slim, so nothing is planned for it: its offsets differ from those of the "
    "original; use the original (negativa inspect shows what is left)"
)
"""Why a plan can't be made for such a library."""

WHOLE = ".whole"
"""Prefix of the name of a section that lost pages; its pieces have the name without it."""

_MAX_MARKER_SIZE = 1 << 16


def is_slimmed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a slimmed library; False for a file that can't be read."""
    return bool(read_fact(path, has_marker))


def has_marker(source: ByteSource) -> bool:
    """Whether the file has the section of the marker; False if its tables can't be read."""
    try:
        return read_host_elf(source).marker is not None
    except FormatError:
        return False


class Marker(Versioned, Record, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON about the original.

    Attributes:
        size_before: size of the original, bytes.
        spare: file name of the spare that has the rest; None if there is none.
    """

    size_before: NonNegative
    spare: str | None = None


def read_marker(source: ByteSource, host: HostElf) -> Marker:
    """Read the marker of a slimmed library.

    Raises:
        FormatError: the marker is damaged, or of another release.
    """
    if host.marker is None:
        raise FormatError(
            source.path,
            None,
            "has no section .negativa, as slimmed libraries have; damaged: install it again",
        )
    offset, size = host.marker
    if size > _MAX_MARKER_SIZE:
        raise FormatError(
            source.path, offset, f"section .negativa has {size:,} bytes; damaged: install it again"
        )
    try:
        return msgspec.json.decode(source.read(offset, size), type=Marker)
    except UNDECODABLE as e:
        raise FormatError(
            source.path,
            offset,
            f"section .negativa: {e}; damaged, or slimmed by another release of pytest-negativa: "
            "undo or reinstall, and slim again",
        ) from e


# Bytes. A crafted file can state any number of zeros for free. A slimmed library has fewer of them
# than its original had bytes.
_MAX_ZEROS_READ = 4 << 30


class AddressSpace:
    """The addresses that the segments (``PT_LOAD``) of a library map; a ``Readable``.

    Args:
        source: the file.
        segments: its program headers.
        sections: those without bytes in the file, which read as zeros outside of segments, too:
            slimming with a spare leaves free addresses between these.
        max_zeros: how many bytes that the file does not hold may be read in all.

    Attributes:
        source: see above.

    Raises:
        FormatError: they overlap, are out of order, or leave the file.
    """

    def __init__(
        self,
        source: ByteSource,
        segments: Sequence[ProgramHeader],
        sections: Sequence[HostSection] = (),
        max_zeros: int = _MAX_ZEROS_READ,
    ) -> None:
        self.path = source.path
        self.source = source
        self._loads = [s for s in segments if s.p_type == PT_LOAD]
        self._zeros_left = max_zeros
        for load in self._loads:
            self._check(load)
        for before, after in pairwise(self._loads):
            if after.p_vaddr < before.p_vaddr + before.p_memsz:
                raise FormatError(
                    self.path,
                    after.p_offset,
                    f"PT_LOAD at address {after.p_vaddr:#x} begins before the one at "
                    f"{before.p_vaddr:#x} ends; crafted or damaged",
                )
        # (start, end, shift to the offset); segments that follow each other are united.
        self._stored: list[tuple[int, int, int]] = []
        for load in self._loads:
            if load.p_filesz:
                start, end = load.p_vaddr, load.p_vaddr + load.p_filesz
                shift = load.p_offset - load.p_vaddr
                if self._stored and self._stored[-1][1:] == (start, shift):
                    start = self._stored.pop()[0]
                self._stored.append((start, end, shift))
        ends = [(load.p_vaddr, load.p_vaddr + load.p_memsz) for load in self._loads]
        self._mapped = union((*ends, *((s.vaddr, s.vaddr + s.size) for s in sections)))

    def _check(self, load: ProgramHeader) -> None:
        # One of zeros alone has no bytes at its offset.
        if load.p_filesz and load.file_end > self.source.size:
            raise FormatError(
                self.path,
                load.p_offset,
                f"PT_LOAD at address {load.p_vaddr:#x} ends at {load.p_offset + load.p_filesz:#x}, "
                f"past the end of the file at {self.source.size:#x}; is it truncated?",
            )
        if load.p_filesz > load.p_memsz or load.p_vaddr + load.p_memsz > 1 << 64:
            raise FormatError(
                self.path,
                load.p_offset,
                f"PT_LOAD at address {load.p_vaddr:#x}: {load.p_filesz:#x} bytes of the file in "
                f"{load.p_memsz:#x} of memory; crafted or damaged",
            )

    def read(self, offset: int, length: int) -> bytes:
        """Read from the address ``offset``; see ``Readable``."""
        end = offset + length
        if length < 0 or not covers(self._mapped, offset, end):
            raise FormatError(
                self.path, None, f"{length:#x} bytes wanted at address {offset:#x}: in no segment"
            )
        parts = []
        position = offset
        for start, stop, shift in self.parts(offset, end):
            parts += [self._zeros(start - position), self.source.read(start + shift, stop - start)]
            position = stop
        parts.append(self._zeros(end - position))
        return b"".join(parts)

    def next_stored(self, offset: int) -> tuple[int, int] | None:
        """The next addresses whose bytes lie in the file; see ``Readable``."""
        at = bisect.bisect_right(self._stored, offset, key=itemgetter(1))
        if at == len(self._stored):
            return None
        start, end, _ = self._stored[at]
        return max(start, offset), end

    def stored_size(self, start: int, end: int) -> int:
        """Count of bytes of ``[start, end)`` that lie in the file."""
        return sum(stop - first for first, stop, _ in self.parts(start, end))

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The parts of ``[start, end)`` that lie in the file: start, end, shift to the offset."""
        at = bisect.bisect_right(self._stored, start, key=itemgetter(1))
        while at < len(self._stored) and self._stored[at][0] < end:
            stored_start, stored_end, shift = self._stored[at]
            yield max(start, stored_start), min(end, stored_end), shift
            at += 1

    def maps(self, offset: int, start: int, size: int) -> bool:
        """Whether bytes of the file at ``offset`` get to the address ``start``."""
        position = start
        for part, end, shift in self.parts(start, start + size):
            if (part, shift) == (position, offset - start):
                position = end
        return position == start + size

    def _zeros(self, count: int) -> bytes:
        self._zeros_left -= count
        if self._zeros_left < 0:
            raise FormatError(
                self.path, None, "states more zeros than any sound library; crafted or damaged"
            )
        return bytes(count)


def whole_sections(space: AddressSpace, host: HostElf) -> tuple[HostSection, ...]:
    """The sections as they were, without their pieces; ``offset`` is an address, too.

    Raises:
        FormatError: the segments don't map a section to its address.
    """
    stored = [s for s in host.sections if s.size]
    for section in stored:
        if not space.maps(section.offset, section.vaddr, section.size):
            raise FormatError(
                space.path,
                section.offset,
                f"section {section.name}: its bytes are not those at address {section.vaddr:#x}; "
                "damaged, or changed by a tool that can't handle such a file",
            )
    # Sections of fatbins have bytes before slimming, unlike .bss.
    gone = [s for s in host.zeros if s.name.startswith(WHOLE) or s.name in FATBIN_SECTIONS]
    whole: list[HostSection] = []
    for section in sorted((*gone, *stored), key=lambda s: (s.vaddr, -s.size)):
        if not whole or section.vaddr >= _end_of(whole[-1]):
            name = section.name.removeprefix(WHOLE)
            whole.append(section._replace(name=name, offset=section.vaddr))
        elif section.name != whole[-1].name or _end_of(section) > _end_of(whole[-1]):
            # Crafted sections could have the same bytes searched again and again.
            raise FormatError(
                space.path,
                section.offset,
                f"section {section.name} overlaps section {whole[-1].name} at address "
                f"{section.vaddr:#x}; crafted or damaged",
            )
    return tuple(whole)


def _end_of(section: HostSection) -> int:
    return section.vaddr + section.size
