"""A ``HostUsage`` to the rows of a report: bytes, pages and functions by library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.functions import function_starts, functions_within
from pytest_negativa.hostcode.usage import read_headers
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
    )


def _row(library: HostLibrary) -> HostRow:
    counts = None if library.unwatched else _count(library)
    return HostRow(
        path=library.paths[0],
        size=library.size,
        watched=library.watched_bytes,
        touched=library.touched_bytes,
        functions=counts and counts[0],
        touched_functions=counts and counts[1],
        unwatched=library.unwatched,
    )


def _count(library: HostLibrary) -> tuple[int, int] | None:
    """Number of functions, and of those on touched pages; None if not known."""
    with contextlib.suppress(FormatError), _open(library) as (source, elf):
        if (starts := function_starts(source, elf)) is not None:
            ranges = unwatched_or_touched(elf, library)
            return len(starts), sum(map(len, functions_within(starts, ranges)))
    return None


def _open(library: HostLibrary) -> AbstractContextManager[tuple[ByteSource, HostElf]]:
    return open_traced(library.paths, library.size, library.build_id)


@contextlib.contextmanager
def open_traced(
    paths: Sequence[str], size: int, build_id: str | None
) -> Iterator[tuple[ByteSource, HostElf]]:
    """A library at the first path that is here of those where it was traced.

    Raises:
        FormatError: it can't be read, or another one is there.
    """
    path = next(filter(os.path.exists, paths), paths[0])
    with ByteSource(path) as source:
        elf = read_headers(source)
        if source.size != size or elf.build_id != build_id:
            raise FormatError(path, None, "is not the library that was traced")
        yield source, elf


def unwatched_or_touched(elf: HostElf, library: HostLibrary) -> list[tuple[int, int]]:
    """Addresses of code that may have run: touched, or on pages that are not watched."""
    untouched = tuple(minus(library.watched, library.touched))
    code = [section for section in elf.sections if section.executable]
    return sorted(
        (section.vaddr + start - section.offset, section.vaddr + end - section.offset)
        for section in code
        for start, end in minus([(section.offset, section.offset + section.size)], untouched)
    )
