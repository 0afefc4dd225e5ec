"""The tripwire: which removed code of copies is armed (4,000 holes at most), and its touches.

``pages/watch.c`` makes whole pages of removed code inaccessible when a process loads a copy,
and logs the first touch of each. It is armed if no process that goes on as traced reads it: not
headers of regions that the traced run loaded, in which the driver looks for what fits, and no page
with a byte of kept code or of anything that is not GPU code.

System calls that read such a page fail without a touch, and what reads the file itself leaves none.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_GNU_RELRO, PT_LOAD, ProgramHeader
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import CodeFinder, LibraryMap
from pytest_negativa.models.reconstruction import ReconstructedLibrary, Reconstruction
from pytest_negativa.models.spans import PAGE_SIZE, Span, covers, intersection, minus, union, within
from pytest_negativa.models.trace import Usage
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.pages.auditors import why_unwatchable
from pytest_negativa.pages.misses import Misses
from pytest_negativa.pages.note import Hole, Note
from pytest_negativa.pages.page_logs import count_lost, read_page_logs
from pytest_negativa.verifying.rounds import RoundResult

# ArmedRow in pages/watch/holes.h: a note follows, if there are holes, and the copy's path.
_ROW = struct.Struct("<II")
_FILE = struct.Struct("<IIQQq")
# Regions are aligned; what lies between two of them belongs to nobody. Bytes.
_MOST_PADDING = 15
# Holes of all libraries, which are up to two mappings each (sysctl vm.max_map_count: 65,530).
_MOST_ARMED = 4000


@dataclass(frozen=True, slots=True)
class Touches:
    """Armed code that the processes of the rounds touched.

    Attributes:
        needs: one for each element or region, the first process first.
        watched: real paths of the originals whose copies were armed in each process, to its end.
    """

    needs: tuple[Need, ...] = ()
    watched: frozenset[str] = frozenset()


def arm(
    planned: Iterable[AnalyzedLibrary], reconstruction: Reconstruction, usage: Usage
) -> tuple[bytes, Mapping[str, tuple[Span, ...]]]:
    """Find what can be armed in copies whose code was overwritten; nothing in compacted ones.

    Args:
        usage: of the traced run.

    Returns:
        The content of the file that NEGATIVA_PAGES_ARMED names; and by real path of the original,
        what is armed in its copy, as offsets in the original.

    Raises:
        FormatError: a copy can't be read.
    """
    if why_unwatchable() is not None:
        return b"", {}
    maps = {p.plan.library.path: p.library_map for p in planned}
    loaded: dict[str, list[int]] = defaultdict(list)
    for use in usage.libraries:
        loaded[use.library.path] += (image.offset for image in use.images)
    found: list[tuple[ReconstructedLibrary, Hole]] = []
    overwritten = [copy for copy in reconstruction.libraries if copy.compaction is None]
    for copy in overwritten:
        if copy.unused and copy.library.path in maps:
            library_map = maps[copy.library.path]
            spans = removed_spans(library_map, copy.unused, loaded[copy.library.path])
            with ByteSource(copy.copy) as source:
                segments = read_host_elf(source).segments
            found += ((copy, hole) for hole in holes_in(segments, spans))
    found.sort(key=lambda row: row[1].start - row[1].end)
    holes: dict[str, list[Hole]] = defaultdict(list)
    for copy, hole in found[:_MOST_ARMED]:
        holes[copy.library.path].append(hole)
    rows = (_pack(copy, sorted(holes.get(copy.library.path, ()))) for copy in overwritten)
    return b"".join(rows), {
        path: union((h.offset, h.offset + h.end - h.start) for h in found)
        for path, found in holes.items()
    }


def removed_spans(
    library_map: LibraryMap, unused: Sequence[Span], loaded: Iterable[int]
) -> tuple[Span, ...]:
    """File offsets of which a process that goes on as traced reads no byte.

    Args:
        unused: removed elements and frames, disjoint.
        loaded: offsets of the images that the traced run loaded.
    """
    images = sorted(loaded)
    spans = [*intersection((frame.span for frame in library_map.iter_frames()), unused)]
    for region in library_map.iter_regions():
        payloads = [element.payload for element in region.elements if element.payload.size]
        at = bisect_left(images, region.span.start)
        is_loaded = at < len(images) and images[at] < region.span.end
        if is_loaded or not all(covers(unused, *payload) for payload in payloads):
            spans += intersection(payloads, unused)
        elif spans and 0 < region.span.start - spans[-1].end <= _MOST_PADDING:
            spans.append(Span(spans[-1].end, region.span.end))
        else:
            spans.append(region.span)
    return union(spans)


def holes_in(segments: Iterable[ProgramHeader], spans: Sequence[Span]) -> Iterator[Hole]:
    """The whole pages of the spans, by segment; none that the loader protects later."""
    segments = tuple(segments)
    relro = union((s.p_vaddr, s.p_vaddr + s.p_memsz) for s in segments if s.p_type == PT_GNU_RELRO)
    for segment in segments:
        if segment.p_type != PT_LOAD:
            continue
        moved = segment.p_vaddr - segment.p_offset
        own = intersection([(segment.p_offset, segment.file_end)], spans)
        addresses = minus(((start + moved, end + moved) for start, end in own), relro)
        for start, end in within(addresses, PAGE_SIZE):
            yield Hole(start, end, start - moved, segment.protection)


def _pack(copy: ReconstructedLibrary, holes: Sequence[Hole]) -> bytes:
    library = copy.library
    digest = bytes.fromhex(library.sha256 or "")
    note = b""
    if holes:
        note = Note(digest, library.size, tuple(holes), Path(library.path).name, (), "").pack()
    files = b"".join(
        _FILE.pack(os.major(s.device), os.minor(s.device), s.inode, s.size, s.mtime_ns)
        for s in (copy.copy_state, copy.original_state)
    )
    body = files + note + bytes(-len(note) % 8)
    path = os.fsencode(copy.copy) + b"\0"
    path += bytes(-len(path) % 8)
    at = _ROW.size + len(body)
    return _ROW.pack(at + len(path), at) + body + path


def read_touches(
    rounds: Iterable[RoundResult],
    planned: Sequence[AnalyzedLibrary],
    reconstruction: Reconstruction,
) -> Touches:
    """Read what the processes of rounds on armed copies touched.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a log can't be read.
    """
    maps = {p.plan.library.path: p.library_map for p in planned}
    finders: dict[str, CodeFinder] = {}
    by_content: dict[str | None, list[ReconstructedLibrary]] = defaultdict(list)
    for copy in reconstruction.libraries:
        by_content[copy.library.sha256].append(copy)
    needs: dict[tuple[str, int], Need] = {}
    watched: dict[str, bool] = {}
    logs = [one for r in rounds if (one := r.run.gpu_page_logs) is not None]
    for process in chain.from_iterable(map(read_page_logs, logs)):
        who = f"process {process.pid} ({Path(process.executable).name})"
        for misses in process.misses:
            for copy in by_content[misses.original.hex()]:
                path = copy.library.path
                watched[path] = watched.get(path, True) and not misses.unwatched
                if path not in finders:
                    removed = (b for b in maps[path].iter_code() if covers(copy.unused, *b.payload))
                    finders[path] = CodeFinder(removed, maps[path].iter_regions())
                for image, kernel in _touched(maps[path], finders[path], misses):
                    need = Need(
                        witness=Witness.TOUCHED,
                        library=path,
                        image=f"{image:#x}",
                        kernel=kernel,
                        test=who,
                    )
                    needs.setdefault((path, image), need)
    is_complete = not any(map(count_lost, logs))
    return Touches(
        tuple(needs.values()),
        frozenset(path for path in watched if is_complete and watched[path]),
    )


def _touched(
    library_map: LibraryMap, removed: CodeFinder, misses: Misses
) -> Iterator[tuple[int, str | None]]:
    """Offsets of the removed elements, frames and regions, each with its first kernel."""
    blocks = []
    for miss in misses.pages.values():
        if miss.times:
            if (block := removed.block_at(miss.first)) is not None:
                blocks.append(block)
            else:
                region = removed.region_at(miss.first)
                yield (miss.first if region is None else region.start), None
    # A page shows its first touch alone: what lies on such pages may have been read, too.
    pages = misses.ranges()
    blocks += (block for block in removed.blocks if pages and covers(pages, *block.payload))
    for block in blocks:
        kernels = library_map.kernels_of(block.content)
        yield block.payload.start, kernels[0].name if kernels else None
