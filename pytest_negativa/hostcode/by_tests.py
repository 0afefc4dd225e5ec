"""Functions that tests touched, of a run that tells them apart.

A set of functions is an integer with a bit for each, because a thousand tests touch some thousand
functions each.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.gpucode.elf import HostElf
from pytest_negativa.hostcode.functions import FunctionStarts, function_starts
from pytest_negativa.hostcode.page_logs import touched_spans
from pytest_negativa.hostcode.summary import open_traced
from pytest_negativa.models.base import Listing
from pytest_negativa.models.hostcode import HOST_TESTS_VERSION, TestedLibrary
from pytest_negativa.models.spans import intersection, union
from pytest_negativa.settings.globs import PathRules

_Ranges = tuple[tuple[int, int], ...]
# Digest, size, build id and paths.
_File = tuple[str, int, str | None, tuple[str, ...]]


class PagesOfTest(NamedTuple):
    """Pages of a library that a test touched: ``pages`` is a bit for each (``TestedLibrary``)."""

    test: str
    sha256: str
    size: int
    build_id: str | None
    paths: tuple[str, ...]
    ranges: _Ranges
    pages: int


def unite_tests(touched: Iterable[PagesOfTest], paths: PathRules) -> Listing[TestedLibrary]:
    """The union for each test, library and ranges.

    Args:
        paths: rules for the paths of the libraries.
    """
    pages: defaultdict[tuple[str, _Ranges], defaultdict[str, int]]
    pages = defaultdict(lambda: defaultdict(int))
    places: defaultdict[str, set[str]] = defaultdict(set)
    files = {}
    for one in touched:
        pages[one.sha256, one.ranges][one.test] |= one.pages
        places[one.sha256].update(map(paths.apply, one.paths))
        files[one.sha256] = one.size, one.build_id
    return Listing(
        format_version=HOST_TESTS_VERSION,
        rows=tuple(
            TestedLibrary(
                sha256=sha256,
                size=files[sha256][0],
                build_id=files[sha256][1],
                paths=tuple(sorted(places[sha256])),
                ranges=ranges,
                tests={test: f"{bits:x}" for test, bits in sorted(by_test.items())},
            )
            for (sha256, ranges), by_test in sorted(pages.items())
        ),
    )


def iter_pages(known: Listing[TestedLibrary]) -> Iterator[PagesOfTest]:
    """The same, test by test.

    Raises:
        StoreError: it is damaged.
    """
    for one in known.rows:
        for test, text in one.tests.items():
            try:
                bits = int(text, 16)
            except ValueError:
                raise StoreError(
                    f"pages of {test!r}: {text[:20]!r} is no hex; combine again"
                ) from None
            yield PagesOfTest(test, one.sha256, one.size, one.build_id, one.paths, one.ranges, bits)


def functions_by_group(
    touched: Iterable[PagesOfTest], groups_of: Callable[[str], Collection[str]]
) -> dict[str, int]:
    """The functions on pages that each group of tests touched; it called no more than these.

    A library that can't be read any more, or names no functions, has none.

    Args:
        touched: see ``gather.Gathered``.
        groups_of: the groups that a test belongs to.
    """
    pages: defaultdict[tuple[_File, _Ranges], defaultdict[str, int]]
    pages = defaultdict(lambda: defaultdict(int))
    for one in touched:
        for group in groups_of(one.test):
            file = one.sha256, one.size, one.build_id, one.paths
            pages[file, one.ranges][group] |= one.pages
    found: defaultdict[str, int] = defaultdict(int)
    first_bits: dict[str, int] = {}
    free = 0
    for ((sha256, size, build_id, paths), ranges), by_group in pages.items():
        with (
            contextlib.suppress(FormatError),
            open_traced(paths, size, build_id) as (source, elf),
        ):
            starts = function_starts(source, elf) or FunctionStarts()
            if sha256 not in first_bits:
                first_bits[sha256] = free
                free += len(starts)
            for group, bits in by_group.items():
                spans = _in_code(elf, touched_spans(ranges, bits))
                found[group] |= _functions(starts, spans) << first_bits[sha256]
    return dict(found)


def _in_code(elf: HostElf, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of spans that are code, and no unwind tables."""
    code = union((one.vaddr, one.vaddr + one.size) for one in elf.sections if one.executable)
    return intersection(spans, code)


def _functions(starts: FunctionStarts, spans: Iterable[tuple[int, int]]) -> int:
    """A bit for each function with code in the spans."""
    found = 0
    for start, end in spans:
        numbers = starts.within(start, end)
        found |= (1 << numbers.stop) - (1 << numbers.start)
    return found
