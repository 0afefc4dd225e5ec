"""Compacts a library: a smaller file without unused GPU code, with every kept byte at its address.

Compaction takes whole pages of unused code out of the file. It splits the segments around them, so
their addresses read as zeros and nothing else moves in memory. It also drops symbols and debug
information. A region without used code goes with its header. Unused code that shares a page with
other bytes becomes zeros.

The original is only read. The result gets its name after it has passed its check.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError, refusing
from pytest_negativa.gpucode.elf_tables import PT_LOAD
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity, LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import Range, union
from pytest_negativa.rewriting.compact.certify import certify, declared_code
from pytest_negativa.rewriting.compact.dynamic import read_original
from pytest_negativa.rewriting.compact.new_tables import NewTables, aligned, append_headers
from pytest_negativa.rewriting.compact.pages import (
    PageLayout,
    PageMap,
    lay_out,
    moved_segments,
    unsegmented,
)
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    CheckError,
    Compacted,
    CompactOptions,
)
from pytest_negativa.rewriting.compact.regions import plan_removal
from pytest_negativa.rewriting.copies import check_sha256, check_size, state_of
from pytest_negativa.rewriting.edits import Change, Edits, Fill, Patch, merge_edits
from pytest_negativa.rewriting.layout import FileLayout, LayoutBuilder, write_layout
from pytest_negativa.storage.atomic import new_file
from pytest_negativa.storage.attributes import copy_metadata


def compact_library(
    path: str | os.PathLike[str],
    target: Path,
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
    *,
    state: FileState | None = None,
) -> Compacted:
    """Write a compacted copy of a library to ``target``, replacing what was there.

    The same input and options make the same bytes. The result has the original's permissions
    without setuid, setgid and the sticky bit.

    Args:
        path: the original.
        target: the result, written by rename; its folder must exist. On failure it stays as it was.
            It may be ``path``: running processes and hard links keep the original.
        library_map, plan: of this file, both or none. Without them the library is only stripped.
        edits: further changes, within kept GPU code. Zeros at the end of a change leave the file.
        options: see ``CompactOptions``.
        state: the file's state before its map was made. If the plan knows no digest, the state
            shows that the file is the same.

    Raises:
        CannotCompactError: the library is left as it is. It may not be the one that was analyzed:
            it is not hashed.
        StaleLibraryError: the file is not the one that was analyzed.
        FormatError: the file can't be read.
        ReconstructError: the result can't be written.
        ValueError: map, plan and edits contradict each other.
    """
    options = options or CompactOptions()
    with ByteSource(path) as source:
        if library_map is not None and plan is not None:
            if library_map.library != plan.library:
                raise ReconstructError(
                    f"{source.path}: its map and its plan are not of the same file"
                )
            _check_identity(source, plan.library, state)
        try:
            with refusing(target, "written", ReconstructError):
                return _compact(source, target, library_map, plan, edits, options)
        except (CheckError, FormatError, ValueError):
            # Another file than the one that was analyzed is the likelier cause.
            if plan is not None and plan.library.sha256 is not None:
                check_sha256(plan.library, source.sha256())
            raise


def foresee_compaction(
    path: str | os.PathLike[str],
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
) -> int:
    """Size in bytes of what ``compact_library`` would write. Nothing is written or hashed.

    Args:
        path, library_map, plan, edits, options: see ``compact_library``.

    Raises:
        CannotCompactError: the library is left as it is.
        FormatError: the file can't be read.
    """
    with ByteSource(path) as source:
        design = _design(source, library_map, plan, edits, options or CompactOptions())
    return design.layout.edits.size


@dataclass(frozen=True, slots=True)
class _Design:
    """The design of a compacted file.

    Attributes:
        pages: the pages that stay.
        new_tables: those of the new file.
        layout: the new file.
    """

    pages: PageLayout
    new_tables: NewTables
    layout: FileLayout


def _design(
    source: ByteSource,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None,
    options: CompactOptions,
) -> _Design:
    """Design the new file.

    Raises:
        CannotCompactError: the library is left as it is.
    """
    edits = edits or Edits(source.size)
    tables = read_original(source)
    page_size = tables.page_size
    if options.page_size is not None:
        page_size = tables.largest_page(options.page_size)
    removal = Edits(source.size)
    if library_map is not None and plan is not None:
        removal = plan_removal(source, library_map, plan)
    changes = merge_edits(removal, edits)
    zeros = union((*removal.filled, *_zeros_of(edits)))
    pages = lay_out(tables, zeros, page_size, options.max_headers)
    builder = LayoutBuilder()
    for start, end in pages.pages.kept:
        builder.append_copy(start, end)
    segments = tuple(moved_segments(tables, pages.holes, pages.pages, zeros=True))
    segments = aligned(source, tables, segments)
    new_tables = append_headers(builder, source, tables, pages.pages, segments, strip=options.strip)
    gain = source.size - builder.size
    if gain < options.min_gain:
        reason = (
            f"saves only {format_bytes(gain)}, the minimum is {format_bytes(options.min_gain)}"
            if gain > 0
            else "there is nothing to remove"
        )
        raise CannotCompactError(source.path, reason)
    unsegmented_zeros = (Fill(start, end, 0) for start, end in unsegmented(tables, pages.pages))
    try:
        for change in (*changes.changes, *unsegmented_zeros):
            for moved in _moved(change, pages.pages):
                builder.change(moved)
        layout = builder.build()
    except ValueError as e:
        raise CannotCompactError(source.path, f"its tables and its map do not agree: {e}") from e
    return _Design(pages, new_tables, layout)


def _check_identity(source: ByteSource, library: LibraryIdentity, state: FileState | None) -> None:
    """Refuse another file, as far as size and state tell."""
    if library.sha256 is not None or state is None:
        check_size(source, library)
    elif state_of(source.fileno()) != state:
        raise StaleLibraryError(f"{source.path} changed after its map was made; try again")


def _moved(change: Change, pages: PageMap) -> Iterator[Change]:
    """A change of the original as changes of the new file; zeros may be missing there.

    Raises:
        ValueError: bytes other than zeros are missing there.
    """
    position = change.start
    for start, end in (*pages.pieces(change.start, change.end), (change.end, change.end)):
        if not change.is_zero(position, start):
            raise ValueError(f"offset {position:#x} is edited and removed")
        if start < end:
            yield change.moved(start, end, pages.offset_of(start))
        position = end


def _compact(
    source: ByteSource,
    target: Path,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None,
    options: CompactOptions,
) -> Compacted:
    design = _design(source, library_map, plan, edits, options)
    with new_file(target) as new:
        write_layout(design.layout, source, new.fd)
        # After writing: the original's permissions may forbid it.
        os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
        declared = ""
        if library_map is not None and plan is not None:
            declared = declared_code(source, library_map, plan, edits)
        certificate = certify(
            source.path, new.path(), declared=declared, page_size=options.page_size
        )
        with ByteSource(new.path()) as compacted:
            original_sha256, sha256 = source.sha256(), compacted.sha256()
        if plan is not None and plan.library.sha256 is not None:
            check_sha256(plan.library, original_sha256)
        if not source.is_unchanged():
            raise StaleLibraryError(f"{source.path} changed while it was compacted; try again")
        lost = copy_metadata(source.fileno(), new.fd) if options.takes_place else ()
        new.publish()
    return Compacted(
        size_before=source.size,
        size_after=design.layout.edits.size,
        original_sha256=original_sha256,
        sha256=sha256,
        gaps=design.pages.holes,
        load_segments=sum(s.p_type == PT_LOAD for s in design.new_tables.segments),
        certificate=certificate,
        notes=(*_notes(design.pages, options), *lost),
        kept=design.layout.copies,
    )


def _notes(layout: PageLayout, options: CompactOptions) -> Iterator[str]:
    if layout.given_up:
        yield (
            f"{format_bytes(layout.given_up)} of unused GPU code are zeros in the file instead of "
            f"gone: more holes would need more than {options.max_headers:,} program headers"
        )


def _zeros_of(edits: Edits) -> Iterator[Range]:
    """Zeros at the end of edited GPU code: cubins that are packed again end in them."""
    for edit in edits.changes:
        if isinstance(edit, Patch):
            yield edit.start + len(edit.data.rstrip(b"\0")), edit.end
        elif edit.value == 0:
            yield edit.start, edit.end
