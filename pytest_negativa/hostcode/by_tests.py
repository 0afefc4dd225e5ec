"""Functions that tests touched, of a run that tells them apart.

A set of functions is an integer with a bit for each, because a thousand tests touch some thousand
functions each.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import HostElf
from pytest_negativa.hostcode.functions import function_starts
from pytest_negativa.hostcode.page_logs import PAGE, LoggedTest
from pytest_negativa.hostcode.summary import open_traced
from pytest_negativa.models.hostcode import HostFile

_Ranges = tuple[tuple[int, int], ...]


def functions_by_group(
    touched: Iterable[tuple[HostFile, LoggedTest]], groups_of: Callable[[str], Collection[str]]
) -> dict[str, int]:
    """The functions on pages that each group of tests touched; it called no more than these.

    A library that can't be read any more, or names no functions, has none.

    Args:
        touched: see ``gather.Gathered``.
        groups_of: the groups that a test belongs to.
    """
    pages: defaultdict[tuple[HostFile, _Ranges], defaultdict[str, int]]
    pages = defaultdict(lambda: defaultdict(int))
    for file, test in touched:
        for group in groups_of(test.name):
            pages[file, test.library.ranges][group] |= test.pages
    found: defaultdict[str, int] = defaultdict(int)
    first_bits: dict[str, int] = {}
    free = 0
    for (file, ranges), by_group in pages.items():
        with (
            contextlib.suppress(FormatError),
            open_traced(file.path, file.size, file.build_id) as (source, elf),
        ):
            starts = function_starts(source, elf) or ()
            if file.sha256 not in first_bits:
                first_bits[file.sha256] = free
                free += len(starts)
            for group, bits in by_group.items():
                spans = _in_code(elf, _spans(ranges, bits))
                found[group] |= _functions(starts, spans) << first_bits[file.sha256]
    return dict(found)


def _spans(ranges: _Ranges, pages: int) -> Iterator[tuple[int, int]]:
    """Addresses of the pages whose bits are set; neighbours as one."""
    for start, end in ranges:
        count = (end - start) // PAGE
        lowest_first = f"{pages & ((1 << count) - 1):b}"[::-1]
        pages >>= count
        for run in re.finditer("1+", lowest_first):
            yield start + run.start() * PAGE, start + run.end() * PAGE


def _in_code(elf: HostElf, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of spans that are code, and no unwind tables."""
    code = [(one.vaddr, one.vaddr + one.size) for one in elf.sections if one.executable]
    for start, end in spans:
        for first, last in code:
            if start < last and first < end:
                yield max(start, first), min(end, last)


def _functions(starts: Sequence[int], spans: Iterable[tuple[int, int]]) -> int:
    """A bit for each function with code in the spans; it ends where the next one begins."""
    found = 0
    for start, end in spans:
        first = max(bisect.bisect_right(starts, start) - 1, 0)
        found |= (1 << bisect.bisect_left(starts, end)) - (1 << first)
    return found
