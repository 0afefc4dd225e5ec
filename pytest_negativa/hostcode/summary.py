"""A ``HostUsage`` to the rows of a report: bytes, pages and functions by library."""

from __future__ import annotations

import contextlib
import os

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf, read_host_elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.functions import FunctionStarts, function_starts, functions_within
from pytest_negativa.models.hostcode import (
    HOST_REPORT_VERSION,
    HostLibrary,
    HostReport,
    HostRow,
    HostUsage,
)
from pytest_negativa.models.spans import minus


def summarize(usage: HostUsage) -> HostReport:
    """Rows and totals; functions are counted if the library is still where it was."""
    rows = map(_row, usage.libraries)
    return HostReport(
        format_version=HOST_REPORT_VERSION,
        run_ids=usage.run_ids,
        processors=tuple(dict.fromkeys(processor.model for processor in usage.processors)),
        processes=sum(usage.processes.values()),
        libraries=tuple(sorted(rows, key=lambda row: (row.touched - row.watched, row.path))),
        incomplete=usage.incomplete,
        failed=usage.failed,
        chosen=usage.chosen,
    )


def _row(library: HostLibrary) -> HostRow:
    known = None if library.unwatched else touched_functions(library)
    return HostRow(
        path=library.paths[0],
        size=library.size,
        watched=library.watched_bytes,
        touched=library.touched_bytes,
        functions=known and len(known[0]),
        touched_functions=known and sum(map(len, known[1])),
        unwatched=library.unwatched,
    )


def touched_functions(library: HostLibrary) -> tuple[FunctionStarts, list[range]] | None:
    """The functions, and the numbers of those on touched pages; None if they are not known."""
    path = next(filter(os.path.exists, library.paths), library.paths[0])
    with contextlib.suppress(FormatError), ByteSource(path) as source:
        elf = read_host_elf(source)
        is_traced = (source.size, elf.build_id) == (library.size, library.build_id)
        starts = function_starts(source, elf) if is_traced else None
        if starts is not None:
            ranges = unwatched_or_touched(elf, library)
            return starts, [*functions_within(starts, ranges)]
    return None


def unwatched_or_touched(elf: HostElf, library: HostLibrary) -> list[tuple[int, int]]:
    """Addresses of code that may have run: touched, or on pages that are not watched."""
    untouched = tuple(minus(library.watched, library.touched))
    code = [section for section in elf.sections if section.executable]
    return sorted(
        (section.vaddr + start - section.offset, section.vaddr + end - section.offset)
        for section in code
        for start, end in minus([(section.offset, section.offset + section.size)], untouched)
    )
