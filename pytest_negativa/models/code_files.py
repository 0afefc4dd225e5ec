"""Files that are GPU code themselves, as one library: which were opened, and their map.

All such files of a distribution are one library. Its content is their rows in RECORD, and each file
is an element: its bytes behind those of the files before it, by name. So plan, lock, verdict and
report treat the files as they treat the elements of a library, and *unused* means that a file goes.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from pytest_negativa.arch import ElementKind, SmArch
from pytest_negativa.models.base import NonNegative, Record
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import (
    Compression,
    Element,
    LibraryIdentity,
    LibraryMap,
    Scope,
    Section,
)
from pytest_negativa.models.spans import Span


class WatchedFiles(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Files of a distribution as a run's watch saw them. Paths are below the site.

    Attributes:
        distribution, version: what installed them.
        site: real path of the folder of the distribution.
        digest: of all their rows in RECORD, see ``installed.record``.
        files: those that were there: the digest field in RECORD and the size in bytes.
        opened: those that some process opened.
        unseen: why others may have been opened, too; None if not.
    """

    distribution: str
    version: str
    site: str
    digest: str
    files: dict[str, tuple[str, NonNegative]]
    opened: tuple[str, ...]
    unseen: str | None = None


def name_of_files(holder: str) -> str:
    """The name of all files of a distribution or folder that are GPU code themselves."""
    return f"{holder} (files)"


def map_files(site: str, distribution: str, digest: str, sizes: Mapping[str, int]) -> LibraryMap:
    """The files of a distribution as one library.

    Args:
        site: real path of the folder of the distribution.
        digest: of their rows in RECORD.
        sizes: bytes of each file, by its path below the site.
    """
    elements, end = [], 0
    for name, size in sorted(sizes.items()):
        span = Span(end, end + size)
        # Neither its name nor RECORD has the arch.
        kind = ElementKind.PTX if name.endswith(".ptx") else ElementKind.CUBIN
        element = Element.bare(span, size, SmArch(0, 0), kind, Compression.NONE)
        elements.append(replace(element, identifier=name))
        end = span.end
    library = LibraryIdentity(
        path=f"{site}/{name_of_files(distribution)}",
        size=end,
        mtime_ns=0,
        build_id=None,
        soname=None,
        sha256=digest,
        file_kind=FileKind.FILES,
    )
    return LibraryMap(
        library=library,
        scope=Scope(headers_only=True),
        sections=(Section(name="", span=Span(0, end), vaddr=0, frames=tuple(elements)),),
        problems=(),
        names=(),
    )
