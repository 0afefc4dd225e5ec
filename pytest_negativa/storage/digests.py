"""The file ``digests.json`` of a run: the SHA-256 of each library when the run ended.

The digests come from the maps of a planned run (``storage.results``), else from
``analysis.digests``. With them a run can be planned again, or combined with others, after its
libraries were installed anew or on another machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.trace import DIGESTS_VERSION, LibraryDigests, TracedLibrary
from pytest_negativa.storage.records import decode_versioned, write_record
from pytest_negativa.storage.runs import digests_in
from pytest_negativa.storage.system import read_regular


def load_digests(folder: Path) -> dict[TracedLibrary, TracedLibrary]:
    """By library as a trace has it: the library with its digest; empty if there is no file.

    Args:
        folder: of the traces.

    Raises:
        StoreError: the file can't be read.
    """
    path = digests_in(folder)
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise StoreError(f"{path}: cannot be read: {e.strerror}") from e
    found = decode_versioned(
        data,
        LibraryDigests,
        DIGESTS_VERSION,
        origin=str(path),
        what="digests of libraries",
        remedy="remove it, and trace again if libraries have changed since",
    )
    return {replace(library, sha256=None): library for library in found.libraries}


def save_digests(folder: Path, libraries: Iterable[TracedLibrary]) -> None:
    """Write the libraries whose digest is known.

    Raises:
        StoreError: the file can't be written.
    """
    known = tuple(library for library in libraries if library.sha256 is not None)
    record = LibraryDigests(format_version=DIGESTS_VERSION, libraries=known)
    write_record(digests_in(folder), record)
