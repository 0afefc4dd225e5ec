"""A page's data as few bytes: JSON with columns as differences, deflated. ``data.js`` reads it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

COLUMNS = {
    # An element or frame, by library and offset. Numbers of libraries are those of the report's
    # rows. A region is counted from 0 in its library, -1 for a frame; sizes are bytes in the file.
    # The name is its source file or largest kernel, demangled; else its region's.
    "elements": ("library", "section", "kind", "arch", "region", "start", "size", "reason",
                 "detail", "name"),
    # A kernel that the run's devices could load, by library and name. Mangled is -1 for an unused
    # one: all mangled names would double the page. The size is that of its largest code in an
    # unpacked cubin, 0 for PTX. First is the test that used it first, -1 if unused; element the
    # first one that holds it; line the first of its code in the file, 0 if unknown.
    "kernels": ("library", "name", "mangled", "size", "first", "element", "file", "line"),
    # A further element that holds a kernel.
    "copies": ("kernel", "element"),
    # A test, or a phase of the session in which something was used first. Milliseconds are those of
    # all its phases; launches and nanoseconds of GPU time those of all kernels, of no library, too.
    "tests": ("name", "outcome", "milliseconds", "launches", "nanoseconds"),
    # Launches of a kernel in a test and in NVTX ranges, the outermost first; GPU time is 0 if it is
    # unknown.
    "launches": ("kernel", "test", "times", "nanoseconds", "ranges"),
    # A saved run; the oldest is first.
    "history": ("run", "code_bytes", "unused_bytes"),
    # CPU code of a library whose pages were traced, in bytes.
    "host": ("path", "watched", "touched"),
}  # fmt: skip
"""The columns of each table. Texts are numbers of texts, -1 for none."""


class Page(NamedTuple):
    """Everything that the HTML report shows.

    Attributes:
        facts: by the names that ``main.js`` and ``pages.js`` read.
        tables: rows of ``COLUMNS``.
        texts: each text once.
    """

    facts: Mapping[str, Any]
    tables: Mapping[str, Sequence[tuple[int, ...]]]
    texts: tuple[str, ...]


def pack(page: Page) -> bytes:
    """The data of a page, deflated (RFC 1950)."""
    tables = {}
    for name, columns in COLUMNS.items():
        values = [*zip(*page.tables[name], strict=True)] or [()] * len(columns)
        # Most numbers are near the ones above them.
        steps = [[number - above for above, number in pairwise((0, *one))] for one in values]
        tables[name] = dict(zip(columns, steps, strict=True))
    return zlib.compress(msgspec.json.encode({**page.facts, "tables": tables, "texts": page.texts}))
