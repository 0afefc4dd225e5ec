"""The file ``digests.json`` of a run: the SHA-256 of each library when the run ended.

The digests come from the maps of a planned run (``storage.results``), else from
``tracing.merge``. With them a run can be planned again, or combined with others, after its
libraries were installed anew or on another machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.models.trace import DIGESTS_VERSION, TracedLibrary
from pytest_negativa.storage.records import load_rows, write_rows
from pytest_negativa.storage.runs import digests_in


def load_digests(folder: Path) -> dict[TracedLibrary, TracedLibrary]:
    """By library as a trace has it: the library with its digest; empty if there is no file.

    Args:
        folder: of the traces.

    Raises:
        StoreError: the file can't be read.
    """
    libraries = load_rows(
        digests_in(folder),
        TracedLibrary,
        DIGESTS_VERSION,
        "digests of libraries",
        "remove it, and trace again if libraries have changed since",
    )
    return {replace(library, sha256=None): library for library in libraries}


def save_digests(folder: Path, libraries: Iterable[TracedLibrary]) -> None:
    """Write the libraries whose digest is known.

    Raises:
        StoreError: the file can't be written.
    """
    known = (library for library in libraries if library.sha256 is not None)
    write_rows(digests_in(folder), known, DIGESTS_VERSION)
