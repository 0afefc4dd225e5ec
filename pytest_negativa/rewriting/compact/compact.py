"""Compaction: a library's file without its unused GPU code, every kept byte at its address.

Whole pages of unused code are taken out of the file. The segments are split around them, so that
their addresses read as zeros and nothing else moves in memory; what the loader never maps goes too.
A region of unused code goes with its header, and what shares a page with something else becomes
zeros.

The original is only read. The result gets its name when it has passed its check, and when a
child process has loaded it.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import Span
from pytest_negativa.models.library import LibraryIdentity, LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.check import check_compacted
from pytest_negativa.rewriting.compact.elf_tables import MAX_HEADERS, ElfTables, read_tables
from pytest_negativa.rewriting.compact.guards import Guards, read_guards, refuse_programs
from pytest_negativa.rewriting.compact.load_check import check_loading
from pytest_negativa.rewriting.compact.pages import PageLayout, PageMap, Range, lay_out
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    Compacted,
    CompactOptions,
    Forecast,
    NotCompacted,
)
from pytest_negativa.rewriting.compact.regions import Removal, plan_removal
from pytest_negativa.rewriting.compact.tables import MARKER, Tail, build_tail, junk
from pytest_negativa.rewriting.compact.write import Blueprint, merged, write_blueprint
from pytest_negativa.rewriting.edits import Edits, Patch
from pytest_negativa.storage.atomic import TEMPORARY_SUFFIX

_PAGE_SIZES = range(4096, (1 << 30) + 1)


def compact_library(
    path: str | os.PathLike[str],
    target: Path,
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
) -> Compacted | NotCompacted:
    """Write a compacted copy of a library to ``target``, replacing what was there.

    Same input and options, same bytes. Permissions are kept, but for those that lend the owner's
    rights. The folder of ``target`` must exist.

    Args:
        path: the original.
        target: where the result goes, by rename; nothing is written there on any failure. May be
            ``path`` itself: processes that run, and hard links, keep the original.
        library_map, plan: of this very file, both or none. Without them no GPU code is removed,
            and the library is only stripped.
        edits: what to change within kept GPU code besides. Where they end in zeros, these leave
            the file, too.
        options: see there.

    Returns:
        What was done, or why the library is better left as it is.

    Raises:
        StaleLibraryError: the file is not the one that was analyzed.
        ReconstructError: it can't be read or the result can't be written.
        ValueError: map, plan and edits contradict each other.
    """
    options = options or CompactOptions()
    if (library_map is None) != (plan is None) or (edits is not None and plan is None):
        raise ValueError("map and plan go together, and edits with them")
    try:
        with ByteSource(path) as source:
            if edits is not None and edits.size != source.size:
                raise ValueError(f"edits for {edits.size:,} bytes of {source.size:,}")
            if library_map is not None and plan is not None:
                if library_map.library != plan.library:
                    raise ReconstructError(
                        f"{source.path}: its map and its plan are not of the same file"
                    )
                _check_identity(source, plan.library)
            try:
                return _compact(source, target, library_map, plan, edits, options)
            except CannotCompactError as e:
                return NotCompacted(path=source.path, size=source.size, reason=e.reason)
    except FormatError as e:
        raise ReconstructError(str(e)) from e


def foresee_compaction(
    path: str | os.PathLike[str],
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
) -> Forecast | NotCompacted:
    """What ``compact_library`` would do, without writing. That the file is the one that was
    analyzed is not checked, and the result is not loaded.

    Raises:
        ReconstructError: the file can't be read.
    """
    try:
        with ByteSource(path) as source:
            try:
                design = _design(source, library_map, plan, edits, options or CompactOptions())
            except CannotCompactError as e:
                return NotCompacted(path=source.path, size=source.size, reason=e.reason)
            return Forecast(path=source.path, size_before=source.size, size_after=design.tail.size)
    except FormatError as e:
        raise ReconstructError(str(e)) from e


@dataclass(frozen=True, slots=True)
class _Design:
    """What a compacted file is to be."""

    tables: ElfTables
    page_size: int
    removal: Removal
    layout: PageLayout
    tail: Tail


def _design(
    source: ByteSource,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None,
    options: CompactOptions,
) -> _Design:
    """Raises CannotCompactError where the library is better left as it is."""
    tables = read_tables(source)
    if MARKER in tables.names:
        raise CannotCompactError(
            source.path, "was compacted before; compact the original for another result"
        )
    if not 0 < options.max_headers <= MAX_HEADERS:
        raise ValueError(f"{options.max_headers} program headers, expected 1 to {MAX_HEADERS}")
    page_size = tables.page_size
    if options.page_size is not None:
        if options.page_size not in _PAGE_SIZES or options.page_size & (options.page_size - 1):
            raise ValueError(f"page size {options.page_size}, expected a power of two from 4096")
        # Where pages are larger than the library's alignment, it can't be loaded.
        page_size = min(options.page_size, *(s.p_align for s in tables.loads))
    refuse_programs(source, tables)
    removal, ends = Removal((), ()), list(_zeros_of(edits))
    functions: tuple[int, ...] = ()
    if library_map is not None and plan is not None:
        guards = read_guards(source, tables)
        functions = guards.functions
        removal = plan_removal(
            source,
            library_map,
            plan,
            guards.why_kept,
            keep_region_headers=options.keep_region_headers,
        )
        ends = [zero for zero in ends if not _in_use(tables, guards, *zero)]
    zeros = merged((*removal.zeros, *ends))
    layout = lay_out(tables, zeros, page_size, options.max_headers, functions)
    tail = build_tail(source, tables, layout, strip=options.strip)
    gain = source.size - tail.size
    if gain < options.min_gain:
        reason = (
            f"saves only {gain:,} bytes, the minimum is {options.min_gain:,}"
            if gain > 0
            else "there is nothing to remove"
        )
        raise CannotCompactError(source.path, reason)
    return _Design(tables, page_size, removal, layout, tail)


def _compact(
    source: ByteSource,
    target: Path,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None,
    options: CompactOptions,
) -> Compacted:
    design = _design(source, library_map, plan, edits, options)
    tables, removal, layout, tail = design.tables, design.removal, design.layout, design.tail
    blueprint = _blueprint(tables, layout.pages, tail, removal, edits)
    with _new_file(target) as temporary:
        with temporary.open("r+b") as file:
            write_blueprint(blueprint, source, file.fileno())
            # Only now: the original's permissions may allow nobody to write.
            mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777
            os.fchmod(file.fileno(), mode)
        with ByteSource(temporary) as compacted:
            check_compacted(source, compacted, removal, edits, library_map, plan, design.page_size)
            sha256 = compacted.sha256()
        outcome = "switched off"
        if options.load_check:
            loading = check_loading(source, tables, temporary)
            if loading.problem is not None:
                raise CannotCompactError(source.path, loading.problem)
            outcome = loading.outcome
        if not source.is_unchanged():
            raise StaleLibraryError(f"{source.path} changed while it was compacted; try again")
        temporary.replace(target)
    zeroed = sum(end - start for zero in removal.zeros for start, end in layout.pages.pieces(*zero))
    return Compacted(
        path=source.path,
        target=os.fspath(target),
        size_before=source.size,
        size_after=tail.size,
        sha256=sha256,
        gpu_code_removed=sum(end - start for start, end in layout.holes),
        gpu_code_zeroed=zeroed,
        unloaded_removed=tail.dropped_bytes,
        holes=len(layout.holes),
        load_segments_before=len(tables.loads),
        load_segments=sum(map(len, layout.runs)),
        dropped_sections=tail.dropped,
        load_check=outcome,
        spared=tuple(_spared(plan, removal.zeros)),
        notes=(*removal.notes, *_notes(layout, options)),
    )


def _spared(plan: LibraryPlan | None, zeros: Sequence[Range]) -> Iterator[Span]:
    """What the plan calls unused and is not zeros as a whole. ``zeros``: disjoint, ascending."""
    starts = [start for start, _ in zeros]
    for decision in plan.decisions if plan is not None else ():
        if decision.kept or not decision.size:
            continue
        at = bisect.bisect_right(starts, decision.start) - 1
        if at < 0 or zeros[at][1] < decision.end:
            yield Span(decision.start, decision.end)


def _notes(layout: PageLayout, options: CompactOptions) -> Iterator[str]:
    if layout.given_up:
        yield (
            f"{layout.given_up:,} bytes of unused GPU code are zeros in the file instead of gone: "
            f"more holes would need more than {options.max_headers:,} program headers"
        )


def _check_identity(source: ByteSource, library: LibraryIdentity) -> None:
    if library.sha256 is None:
        raise StaleLibraryError(
            f"{source.path}: its digest isn't known, for it changed while it was read or was read "
            "by an earlier release; run pytest --negativa again"
        )
    if source.size != library.size or source.sha256() != library.sha256:
        raise StaleLibraryError(
            f"{source.path} is not the file that was analyzed (sha256 {library.sha256}); "
            "run pytest --negativa again"
        )


def _blueprint(
    tables: ElfTables, pages: PageMap, tail: Tail, removal: Removal, edits: Edits | None
) -> Blueprint:
    copies = [
        (start, end, place) for (start, end), place in zip(pages.kept, pages.places, strict=True)
    ]
    zeros = merged((*removal.zeros, *junk(tables, pages)))
    patches = [(_new_offset(pages, start), data) for start, data in removal.patches]
    for edit in edits.in_order() if edits is not None else ():
        data = (
            edit.data if isinstance(edit, Patch) else bytes([edit.value]) * (edit.end - edit.start)
        )
        position = edit.start
        for start, end in (*pages.pieces(edit.start, edit.end), (edit.end, edit.end)):
            if any(data[position - edit.start : start - edit.start]):
                raise ValueError(f"offset {position:#x} is edited and removed")
            if start < end:
                part = data[start - edit.start : end - edit.start]
                patches.append((_new_offset(pages, start), part))
            position = end
    return Blueprint(
        size=tail.size,
        copies=(*copies, *tail.copies),
        zeros=tuple(
            (_new_offset(pages, start), _new_offset(pages, end - 1) + 1)
            for zero in zeros
            for start, end in pages.pieces(*zero)
        ),
        patches=(*patches, *tail.patches),
    )


def _zeros_of(edits: Edits | None) -> Iterator[Range]:
    """Where kept GPU code ends in zeros after its edits, as cubins do that are packed anew."""
    for edit in edits.in_order() if edits is not None else ():
        if isinstance(edit, Patch):
            yield edit.offset + len(edit.data.rstrip(b"\0")), edit.end
        elif edit.value == 0:
            yield edit.start, edit.end


def _in_use(tables: ElfTables, guards: Guards, start: int, end: int) -> bool:
    """Whether the loader uses what lies at these offsets."""
    return any(
        guards.why_kept(
            max(start, load.p_offset) - load.p_offset + load.p_vaddr,
            min(end, load.file_end) - load.p_offset + load.p_vaddr,
        )
        for load in tables.loads
        if load.p_offset < end and start < load.file_end
    )


def _new_offset(pages: PageMap, offset: int) -> int:
    new = pages.new_offset(offset)
    if new is None:
        raise ValueError(f"offset {offset:#x} is needed and removed")
    return new


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    """A file beside ``target`` that is gone if not renamed.

    It needs a name: the loader is to load it.
    """
    temporary = None
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY_SUFFIX
        )
        temporary = Path(name)
        os.close(handle)
        yield temporary
    except OSError as e:
        raise ReconstructError(f"{target}: cannot be written: {e.strerror}") from e
    finally:
        # Also when interrupted.
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
