"""Plans at kernel granularity to edits: unused code inside cubins that stay.

A compressed cubin is unpacked, filled and packed again into the space it had. Addresses stay;
what becomes free at the end of a payload is zeros, so that compaction may take whole
pages of it out of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import Span
from pytest_negativa.models.library import Compression, Element, Frame, LibraryMap
from pytest_negativa.models.plan import CodeRange, LibraryPlan, TrimmedCubin
from pytest_negativa.rewriting.cubin_code import CubinCodeError, FilledCubin, fill_code
from pytest_negativa.rewriting.edits import Edits, Fill, Patch
from pytest_negativa.rewriting.repack import RepackError, repack, repack_frame

# Of compressed_size in the header of an element, see gpucode.fatbin.
_COMPRESSED_SIZE_OFFSET = 0x10
_COMPRESSED_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RewrittenCubin:
    """What became of one cubin of ``LibraryPlan.trimmed``.

    Attributes:
        start: file offset of its payload or frame.
        filled: code that was overwritten, as offsets in the unpacked cubin. Less than the plan
            says where code or data that stays refers to it.
        stored_before, stored_after: bytes of the payload or frame in use.
        zeros: bytes at the end of the payload or frame that are zeros now, as a span.
        left_alone: why nothing was changed, or None.
    """

    start: int
    filled: tuple[CodeRange, ...]
    stored_before: int
    stored_after: int
    zeros: Span
    left_alone: str | None = None


@dataclass(frozen=True, slots=True)
class KernelEdits:
    """The edits for one library, and what they do to each cubin, by offset."""

    edits: Edits
    cubins: tuple[RewrittenCubin, ...]


def trim_kernels(
    source: ByteSource, library_map: LibraryMap, plan: LibraryPlan, value: int
) -> KernelEdits:
    """Fill the unused code of every cubin in ``plan.trimmed`` with ``value``.

    What can't be done safely is left alone, and the result says so: what is claimed of a copy
    must come from there and not from the plan.

    Args:
        source: the original library, which the map and the plan are of.

    Raises:
        FormatError: the library can't be read.
        ValueError: the plan is not of this map.
    """
    wanted = {trimmed.start: trimmed for trimmed in plan.trimmed}
    edits: list[Fill | Patch] = []
    cubins: list[RewrittenCubin] = []
    for holder, trimmed in _holders(library_map, wanted):
        rewriter = _Rewriter(source, holder, trimmed, value)
        made, cubin = rewriter.rewrite()
        edits += made
        cubins.append(cubin)
    if len(cubins) != len(wanted):
        raise ValueError(f"{len(wanted) - len(cubins)} cubins of the plan are not in the map")
    return KernelEdits(Edits.of(source.size, edits), tuple(sorted(cubins, key=lambda c: c.start)))


def _holders(
    library_map: LibraryMap, wanted: dict[int, TrimmedCubin]
) -> Iterator[tuple[Element | Frame, TrimmedCubin]]:
    for element in library_map.iter_elements():
        if element.payload.start in wanted:
            yield element, wanted[element.payload.start]
    for frame in library_map.iter_frames():
        if frame.span.start in wanted:
            yield frame, wanted[frame.span.start]


class _Rewriter:
    """One cubin, from its stored bytes to edits."""

    def __init__(
        self, source: ByteSource, holder: Element | Frame, trimmed: TrimmedCubin, value: int
    ) -> None:
        self._holder = holder
        self._trimmed = trimmed
        self._value = value
        if isinstance(holder, Element):
            self._space, self._compression = holder.payload, holder.compression
            stored_size = holder.stored_size
        else:
            self._space, self._compression = holder.span, Compression.ZSTD
            stored_size = holder.span.size
        self._stored = source.read(self._space.start, stored_size)

    def rewrite(self) -> tuple[list[Fill | Patch], RewrittenCubin]:
        try:
            content = unpack(self._stored, self._compression, self._holder.unpacked_size)
            cubin = fill_code(content, self._trimmed.unused, self._value)
            if not cubin.filled:
                raise CubinCodeError("all its code is referred to by what stays")
            if self._compression is Compression.NONE:
                return self._in_place(cubin)
            if isinstance(self._holder, Frame):
                return self._as_frame(cubin)
            return self._as_payload(self._holder, cubin)
        except (PayloadError, CubinCodeError, RepackError) as e:
            return [], self._result((), len(self._stored), str(e))

    def _in_place(self, cubin: FilledCubin) -> tuple[list[Fill | Patch], RewrittenCubin]:
        start = self._space.start
        edits: list[Fill | Patch] = [
            Fill(start + code.start, start + code.end, self._value) for code in cubin.filled
        ]
        edits += [
            Patch(start + span.start, cubin.content[span.start : span.end]) for span in cubin.tables
        ]
        return edits, self._result(cubin.filled, len(self._stored))

    def _as_payload(
        self, element: Element, cubin: FilledCubin
    ) -> tuple[list[Fill | Patch], RewrittenCubin]:
        packed = repack(cubin.content, self._stored, self._compression, self._space.size)
        padding = self._space.size - len(packed)
        edits: list[Fill | Patch] = [
            Patch(
                element.header_offset + _COMPRESSED_SIZE_OFFSET,
                _COMPRESSED_SIZE.pack(len(packed)),
            ),
            Patch(self._space.start, packed + bytes(padding)),
        ]
        return edits, self._result(cubin.filled, len(packed), zeros=padding)

    def _as_frame(self, cubin: FilledCubin) -> tuple[list[Fill | Patch], RewrittenCubin]:
        packed, padding = repack_frame(cubin.content, self._stored)
        edits: list[Fill | Patch] = [Patch(self._space.start, packed)]
        return edits, self._result(cubin.filled, len(packed) - padding, zeros=padding)

    def _result(
        self,
        filled: tuple[CodeRange, ...],
        stored_after: int,
        left_alone: str | None = None,
        *,
        zeros: int = 0,
    ) -> RewrittenCubin:
        return RewrittenCubin(
            start=self._space.start,
            filled=filled,
            stored_before=len(self._stored),
            stored_after=stored_after,
            zeros=Span(self._space.end - zeros, self._space.end),
            left_alone=left_alone,
        )
