"""What came back to libraries that were slimmed with a spare."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import NonNegative, Record

MISSES_VERSION = 2
"""Of ``negativa misses --json``. History: 2 has ``rows``; 1 is the first."""


class CodeKind(str, enum.Enum):
    """What a page that came back holds, at the place that was touched first."""

    FUNCTION = "function"
    UNWIND_TABLES = "unwind tables"
    GPU_CODE = "GPU code"
    GPU_HEADERS = "GPU headers"  # of regions and elements, which the driver reads to choose
    OTHER = "other"


class MissedCode(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A function, or an element or frame of GPU code, that came back.

    Attributes:
        kind: what it is.
        offset: file offset, in the original, of the function, payload, frame or section; None for
            a function that no table names.
        name: mangled name of a function, if it has a symbol; the section of other code.
        region: file offset of the region of an element.
        arch: of GPU code.
        kernels: mangled names of its kernels.
        pages: how many pages of it came back.
        misses: how often, in all processes.
    """

    kind: CodeKind
    offset: NonNegative | None
    name: str | None = None
    region: NonNegative | None = None
    arch: str | None = None
    kernels: tuple[str, ...] = ()
    pages: NonNegative
    misses: NonNegative


class MissedLibrary(Record, frozen=True, kw_only=True):
    """A library whose pages came back.

    Attributes:
        name: the file's name.
        sha256, size: of the original.
        path: where it, or the original, is; None if it was not found.
        pages: how many pages of 4 KiB came back.
        beside: how many of these came back unasked, beside another page.
        misses: how often a process, with its forked children, touched such a page first.
        code: what came back, the most misses first.
        unknown: why it is not known; else None.
    """

    name: str
    sha256: str
    size: NonNegative
    path: str | None
    pages: NonNegative
    beside: NonNegative
    misses: NonNegative
    code: tuple[MissedCode, ...]
    unknown: str | None
