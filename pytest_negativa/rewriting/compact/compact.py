"""Compaction: zeros leave the file, addresses stay; small gains refused; the certificate.

Compaction takes whole pages of unused code out of the file. It splits the segments around them, so
their addresses read as zeros and nothing else moves in memory. It also drops symbols and debug
information. A region without used code goes with its header. Unused code that shares a page with
other bytes becomes zeros.

The original is only read. The result gets its name after it has passed its check: ``certify.c``, a
program that trusts no writer, tells whether a smaller library means the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import ReconstructError, StaleLibraryError, refusing
from pytest_negativa.gpucode.elf import ElfTables
from pytest_negativa.gpucode.source import ByteSource, opened
from pytest_negativa.models.library import LibraryIdentity, LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.spans import Range, union
from pytest_negativa.rewriting.compact.new_tables import aligned, append_headers
from pytest_negativa.rewriting.compact.original_tables import page_size, read_original
from pytest_negativa.rewriting.compact.pages import PageMap, lay_out, moved_segments, unsegmented
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    CheckError,
    CompactOptions,
    Design,
    Smaller,
)
from pytest_negativa.rewriting.layout import (
    Change,
    Edits,
    Fill,
    LayoutBuilder,
    Patch,
    check_sha256,
    check_size,
    merge_edits,
    write_layout,
)
from pytest_negativa.rewriting.plan_edits import plan_removal, unused_ranges
from pytest_negativa.storage.atomic import NewFile, copy_metadata


def compact_library(
    path: str | os.PathLike[str] | ByteSource,
    target: Path,
    library_map: LibraryMap | None = None,
    plan: LibraryPlan | None = None,
    edits: Edits | None = None,
    options: CompactOptions | None = None,
) -> Smaller:
    """Write a compacted copy of a library to ``target``, replacing what was there.

    The same input and options make the same bytes. The result has the original's permissions
    without setuid, setgid and the sticky bit.

    Args:
        path: the original, which may be open. Then it is the one that was analyzed, even if the
            plan knows no digest.
        target: the result, written by rename; its folder must exist. On failure it stays as it was.
            It may be ``path``: running processes and hard links keep the original.
        library_map, plan: of this file, both or none. Without them the library is only stripped.
        edits: further changes, within kept GPU code. Zeros at the end of a change leave the file.
        options: see ``CompactOptions``.

    Raises:
        CannotCompactError: the library is left as it is. It may not be the one that was analyzed:
            it is not hashed.
        StaleLibraryError: the file is not the one that was analyzed.
        FormatError: the file can't be read.
        ReconstructError: the result can't be written.
    """
    options = options or CompactOptions()
    with opened(path) as source:
        if plan is not None:
            check_identity(path, source, plan.library)
        with refusing(target, "written", ReconstructError):
            return write_design(
                source,
                target,
                design_compaction(source, library_map, plan, edits, options),
                None if plan is None else plan.library,
                declared=declared_code(source, library_map, plan, edits),
                takes_place=options.takes_place,
            )


def design_compaction(
    source: ByteSource,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None,
    options: CompactOptions,
) -> Design:
    """Design what ``compact_library`` would write. Nothing is written or hashed.

    Args:
        source: the original.
        library_map, plan, edits, options: see ``compact_library``.

    Raises:
        CannotCompactError: the library is left as it is.
        FormatError: the file can't be read.
    """
    edits = edits or Edits(source.size)
    tables = read_original(source)
    removal = Edits(source.size)
    try:
        if library_map is not None and plan is not None:
            removal = plan_removal(source, library_map, plan)
        return _design(source, tables, removal, edits, options)
    except ValueError as e:
        problem = f"its tables and its map do not agree: {e}"
        raise CannotCompactError(source.path, problem) from e


def _design(
    source: ByteSource, tables: ElfTables, removal: Edits, edits: Edits, options: CompactOptions
) -> Design:
    """The new file.

    Raises:
        ValueError: changes contradict each other.
    """
    changes = merge_edits(removal, edits)
    zeros = union((*removal.filled, *_zeros_of(edits)))
    pages = lay_out(tables, zeros, page_size(tables), options.max_headers)
    builder = LayoutBuilder()
    for start, end in pages.kept:
        builder.append_copy(start, end)
    segments = aligned(source, tables, tuple(moved_segments(tables, pages, zeros=True)))
    append_headers(builder, source, tables, pages, segments, strip=options.strip)
    refuse_small_gain(source, builder.size, options.min_gain)
    unsegmented_zeros = (Fill(start, end, 0) for start, end in unsegmented(tables, pages))
    for change in (*changes.changes, *unsegmented_zeros):
        for moved in _moved(change, pages):
            builder.change(moved)
    note = (
        f"{format_bytes(pages.given_up)} of unused GPU code are zeros in the file instead of "
        f"gone: more holes would need more than {options.max_headers:,} program headers"
    )
    return Design(builder.build(), pages.holes, (note,) if pages.given_up else ())


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


def _zeros_of(edits: Edits) -> Iterator[Range]:
    """Zeros at the end of edited GPU code: cubins that are packed again end in them."""
    for edit in edits.changes:
        if isinstance(edit, Patch):
            yield edit.start + len(edit.data.rstrip(b"\0")), edit.end
        elif edit.value == 0:
            yield edit.start, edit.end


# ---- Writing, also of libraries with a spare ----


def check_identity(
    path: str | os.PathLike[str] | ByteSource, source: ByteSource, library: LibraryIdentity
) -> None:
    """Refuse another file than the one that was analyzed, as far as its size tells.

    Args:
        path: what the caller gave: a file without a digest must be open since it was analyzed.
        source: the file.
        library: as it was analyzed.

    Raises:
        StaleLibraryError: it is another file.
    """
    if library.sha256 is not None or source is not path:
        check_size(source, library)


def refuse_small_gain(source: ByteSource, size: int, least: int) -> None:
    """Refuse a result that is too large to be worth it; ``size`` and ``least`` gain in bytes.

    Raises:
        CannotCompactError: see above.
    """
    gain = source.size - size
    if gain < least:
        reason = (
            f"saves only {format_bytes(gain)}, the minimum is {format_bytes(least)}"
            if gain > 0
            else "there is nothing to remove"
        )
        raise CannotCompactError(source.path, reason)


def write_design(
    source: ByteSource,
    target: Path,
    design: Design,
    library: LibraryIdentity | None,
    spares: Path | None = None,
    *,
    declared: str = "",
    takes_place: bool = True,
) -> Smaller:
    """Write a library, and its spare before it.

    Args:
        source: the original.
        target: the new library.
        design: of the new library.
        library: the original as it was analyzed.
        spares: the folder of the spare, if it has one.
        declared: see ``certify``.
        takes_place: of the original, so the result gets its owner, attributes and times, too.

    Raises:
        CannotCompactError: the result fails its check.
        StaleLibraryError: the original is not the file that was analyzed.
        ReconstructError: the spare can't be written.
        OSError: the library can't be written.
    """
    spare, new_spare, folder = design.spare, None, spares
    original_sha256 = None if spare is None else spare.note.original.hex()
    with contextlib.ExitStack() as stack:
        if spare is not None and spares is not None:
            # Where users will find it.
            folder = Path(next(iter(spare.note.folders), spares))
            with refusing(folder, "written", ReconstructError):
                new_spare = stack.enter_context(NewFile(spares / spare.note.spare_name))
                write_layout(spare.layout, source, new_spare.fd)
                os.fchmod(new_spare.fd, 0o644)
        new = stack.enter_context(NewFile(target))
        write_layout(design.layout, source, new.fd)
        # After writing: the original's permissions may forbid it.
        os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
        certificate = certify(
            source.path,
            new.path,
            None if new_spare is None else new_spare.path,
            declared=declared,
            sha256=original_sha256,
        )
        with ByteSource(new.path) as made:
            sha256 = made.sha256()
        original_sha256 = original_sha256 or source.sha256()
        if library is not None and library.sha256 is not None:
            check_sha256(library, original_sha256)
        if not source.is_unchanged():
            raise StaleLibraryError(f"{source.path} changed while it was read; try again")
        lost = copy_metadata(source.fileno(), new.fd) if takes_place else ()
        if folder is not None and new_spare is not None:
            with refusing(folder, "written", ReconstructError):
                os.fsync(new_spare.fd)
                new_spare.publish()
        # Who gives the files their places forces the names to disk.
        new.publish()
    return Smaller(
        library=target,
        size_before=source.size,
        size_after=design.size,
        original_sha256=original_sha256,
        sha256=sha256,
        holes=design.holes,
        kept=design.layout.copies,
        certificate=certificate,
        notes=(*design.notes, *lost),
    )


PROGRAM = Path(__file__).with_name("_certify")
# Its exit status; 2 is that it can't know, such as without memory.
_WRONG = 1


def certify(
    original: str | os.PathLike[str],
    slim: Path,
    spare: Path | None = None,
    *,
    declared: str = "",
    sha256: str | None = None,
) -> str:
    """Compare a slim library with its original.

    Args:
        original, slim: the library before and after.
        spare: the file that has the removed pages, if there is one.
        declared: see ``declared_code``.
        sha256: of the original, if it is known.

    Returns:
        The program's word, a line.

    Raises:
        CheckError: the library means something else: the writer has a bug, or the disk is faulty.
        CannotCompactError: the program can't be run (without a C compiler it was not built), or
            can't read a file, or was killed.
    """
    try:
        done = subprocess.run(
            [PROGRAM, original, slim, spare or "", sha256 or ""],
            input=declared,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as e:
        raise CannotCompactError(
            original,
            f"{PROGRAM}, which certifies results, can't be run: {e.strerror}; install "
            "pytest-negativa again, from a wheel or with a C compiler",
        ) from e
    if done.returncode == _WRONG:
        problem = done.stderr.strip().partition(": not certified: ")[2]
        raise CheckError(original, f"the result fails its check: {problem}")
    if done.returncode:
        why = done.stderr.strip() or f"status {done.returncode}"
        raise CannotCompactError(original, f"the result could not be checked: {why}")
    return done.stdout.strip()


def declared_code(
    source: ByteSource,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    edits: Edits | None = None,
) -> str:
    """Declare what may differ, for the certificate: lines for regions, unused and trimmed code.

    Args:
        source: the original.
        library_map, plan: of it, both or none.
        edits: those within kept GPU code, which trim cubins.
    """
    if library_map is None or plan is None:
        return ""
    edits = edits or Edits(source.size)
    unused = unused_ranges(plan)
    lines = [f"region {r.span.start} {r.span.end}" for r in library_map.iter_regions()]
    for block in library_map.iter_code():
        start, end = block.span
        if (block.payload.start, end) in unused:
            if start < end:
                lines.append(f"unused {start} {end}")
        elif any(True for _ in edits.overlapping(start, end)):
            trimmed = edits.applied_to(source.read(start, end - start), start)
            lines.append(f"trimmed {start} {end} {hashlib.sha256(trimmed).hexdigest()}")
    return "\n".join(lines)
