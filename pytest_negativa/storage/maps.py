"""Maps of libraries as JSON, in files or in memory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pytest_negativa.models.library import LibraryMap
from pytest_negativa.storage.records import decode_versioned, encode_hook, read_own


def encode_map(library_map: LibraryMap) -> bytes:
    """The JSON of a map; ``decode_map`` reads it."""
    return msgspec.json.encode(library_map, enc_hook=encode_hook)


def decode_map(data: bytes, origin: str) -> LibraryMap:
    """The map in ``data``; ``origin`` (a path) is for messages.

    Raises:
        StoreError: not a map, or of a version that this release does not read.
    """
    return decode_versioned(
        data,
        LibraryMap,
        origin=origin,
        what="a library map",
        remedy="make the map again",
    )


def load_map(path: Path) -> LibraryMap:
    """Read a map file.

    Raises:
        StoreError: the file can't be read, is no map, or of another format.
    """
    return decode_map(read_own(path), os.fspath(path))
