"""A slimmed library as a process sees it: bytes by address, and each section in one piece.

``negativa slim`` takes pages out of a library's file. All addresses stay, and the addresses of the
pages that are gone read as zeros. With a spare they are gaps between segments. A section falls into
pieces, one for each run of pages that stay. File offsets say little here, so this module works with
addresses.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf, HostSection, HostSegment
from pytest_negativa.gpucode.source import ByteSource

# Bytes. A crafted file can state any number of zeros for free. A slimmed library has fewer of them
# than its original had bytes.
_MAX_ZEROS_READ = 4 << 30
# Bytes. slim takes out whole pages; .bss may begin anywhere.
_SMALLEST_PAGE = 4096


class AddressSpace:
    """The addresses that the segments (``PT_LOAD``) of a library map; a ``Readable``.

    Args:
        source: the file.
        segments: its program headers.
        max_zeros: how many bytes that the file does not hold may be read in all.
        with_gaps: gaps that slimming with a spare left between segments read as zeros, too.

    Raises:
        FormatError: they overlap, are out of order, or leave the file.
    """

    def __init__(
        self,
        source: ByteSource,
        segments: Sequence[HostSegment],
        max_zeros: int = _MAX_ZEROS_READ,
        *,
        with_gaps: bool = False,
    ) -> None:
        self.path = source.path
        self._source = source
        self._loads = [s for s in segments if s.kind == "PT_LOAD"]
        self._zeros_left = max_zeros
        for load in self._loads:
            self._check(load)
        for before, after in pairwise(self._loads):
            if after.vaddr < before.vaddr + before.memory_size:
                raise FormatError(
                    self.path,
                    after.offset,
                    f"PT_LOAD at address {after.vaddr:#x} begins before the one at "
                    f"{before.vaddr:#x} ends; crafted or damaged",
                )
        # (start, end, shift to the offset); segments that follow each other are united.
        self._stored: list[tuple[int, int, int]] = []
        for load in self._loads:
            if load.file_size:
                start, end = load.vaddr, load.vaddr + load.file_size
                shift = load.offset - load.vaddr
                if self._stored and self._stored[-1][1:] == (start, shift):
                    start = self._stored.pop()[0]
                self._stored.append((start, end, shift))
        self._mapped: list[tuple[int, int]] = []
        previous: HostSegment | None = None
        for load in self._loads:
            start, end = load.vaddr, load.vaddr + load.memory_size
            if self._mapped and (
                self._mapped[-1][1] == start
                or (with_gaps and previous is not None and _is_split(previous, load))
            ):
                start = self._mapped.pop()[0]
            self._mapped.append((start, end))
            previous = load

    def _check(self, load: HostSegment) -> None:
        if load.offset + load.file_size > self._source.size:
            raise FormatError(
                self.path,
                load.offset,
                f"PT_LOAD at address {load.vaddr:#x} ends at {load.offset + load.file_size:#x}, "
                f"past the end of the file at {self._source.size:#x}; is it truncated?",
            )
        if load.file_size > load.memory_size or load.vaddr + load.memory_size > 1 << 64:
            raise FormatError(
                self.path,
                load.offset,
                f"PT_LOAD at address {load.vaddr:#x}: {load.file_size:#x} bytes of the file in "
                f"{load.memory_size:#x} of memory; crafted or damaged",
            )

    def read(self, offset: int, length: int) -> bytes:
        """Read from the address ``offset``; see ``Readable``."""
        end = offset + length
        if length < 0 or not self.is_mapped(offset, end):
            raise FormatError(
                self.path, None, f"{length:#x} bytes wanted at address {offset:#x}: in no segment"
            )
        parts = []
        position = offset
        for start, stop, shift in self._parts(offset, end):
            parts += [self._zeros(start - position), self._source.read(start + shift, stop - start)]
            position = stop
        parts.append(self._zeros(end - position))
        return b"".join(parts)

    def next_stored(self, offset: int) -> tuple[int, int] | None:
        """The next addresses whose bytes lie in the file; see ``Readable``."""
        at = bisect.bisect_right(self._stored, offset, key=_end)
        if at == len(self._stored):
            return None
        start, end, _ = self._stored[at]
        return max(start, offset), end

    def stored_size(self, start: int, end: int) -> int:
        """How many bytes of ``[start, end)`` lie in the file."""
        return sum(stop - first for first, stop, _ in self._parts(start, end))

    def is_mapped(self, start: int, end: int) -> bool:
        """Whether all of ``[start, end)`` is in segments."""
        at = bisect.bisect_right(self._mapped, start, key=_start) - 1
        return at >= 0 and start <= end <= self._mapped[at][1]

    def offset_of(self, address: int) -> int | None:
        """The file offset of an address; None if the file doesn't hold its byte."""
        for _, _, shift in self._parts(address, address + 1):
            return address + shift
        return None

    def hole_end(self, address: int) -> int:
        """The end of the zeros at ``address`` that the file doesn't hold; or ``address``."""
        at = bisect.bisect_right(self._mapped, address, key=_start) - 1
        if at < 0 or address >= self._mapped[at][1]:
            return address
        stored = self.next_stored(address)
        return self._mapped[at][1] if stored is None else min(stored[0], self._mapped[at][1])

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The parts of ``[start, end)`` that lie in the file: start, end, shift to the offset."""
        at = bisect.bisect_right(self._stored, start, key=_end)
        while at < len(self._stored) and self._stored[at][0] < end:
            stored_start, stored_end, shift = self._stored[at]
            yield max(start, stored_start), min(end, stored_end), shift
            at += 1

    def _zeros(self, count: int) -> bytes:
        self._zeros_left -= count
        if self._zeros_left < 0:
            raise FormatError(
                self.path, None, "states more zeros than any sound library; crafted or damaged"
            )
        return bytes(count)


def _is_split(before: HostSegment, after: HostSegment) -> bool:
    """Whether two segments were one, of which whole pages left."""
    end = before.vaddr + before.memory_size
    return (
        (before.writable, before.executable) == (after.writable, after.executable)
        and before.file_size == before.memory_size
        and end % _SMALLEST_PAGE == after.vaddr % _SMALLEST_PAGE == 0
    )


def _start(found: tuple[int, ...]) -> int:
    return found[0]


def _end(found: tuple[int, ...]) -> int:
    return found[1]


def whole_sections(space: AddressSpace, host: HostElf) -> tuple[HostSection, ...]:
    """Unite the pieces of each section, by address; ``offset`` is an address, too.

    The old size of a section is not known. If its last pages are gone, it ends where something
    else begins.

    Raises:
        FormatError: the segments don't map a section to its address.
    """
    pieces = sorted((s for s in host.sections if s.size), key=lambda s: s.vaddr)
    for piece in pieces:
        _check_place(space, piece)
    # A section of nothing but zeros has no piece.
    starts = sorted(s.vaddr for s in (*pieces, *host.zeros))
    whole: list[HostSection] = []
    for piece in pieces:
        end = piece.vaddr + piece.size
        if end % _SMALLEST_PAGE == 0:
            follows = bisect.bisect_left(starts, end)
            limit = starts[follows] if follows < len(starts) else 1 << 64
            end = max(end, min(space.hole_end(end), limit))
        before = whole[-1] if whole else None
        if (
            before is not None
            and before.name == piece.name
            and before.offset + before.size == piece.vaddr > before.offset
        ):
            whole[-1] = before._replace(size=end - before.offset)
        else:
            whole.append(piece._replace(offset=piece.vaddr, size=end - piece.vaddr))
    return tuple(whole)


def _check_place(space: AddressSpace, piece: HostSection) -> None:
    """Check that the segments map a section's bytes to its address; two may share the work."""
    position, end = piece.vaddr, piece.vaddr + piece.size
    while position < end:
        stored = space.next_stored(position)
        offset = piece.offset + position - piece.vaddr
        if stored is None or stored[0] != position or space.offset_of(position) != offset:
            raise FormatError(
                space.path,
                offset,
                f"section {piece.name}: its bytes are not those at address {position:#x}; damaged, "
                "or changed by a tool that can't handle such a file",
            )
        position = stored[1]
