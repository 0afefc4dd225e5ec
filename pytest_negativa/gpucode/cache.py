"""The cache of library maps: the key of an entry, reader versions, the limit of 1 GiB.

The key of an entry is the library's size, modification time, change time, inode, and build id. If
it has no build id, the SHA-256 of its bytes takes that place. The change time matters because a
rewritten copy may keep size, build id and modification time of its original.

An entry is one file, written under a temporary name and renamed, so processes may share the
folder: the summary and the map, both as JSON in a zstd frame with a checksum (RFC 8878). An entry
that does not match its checksums counts as missing, and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zstandard

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.summary import LibrarySummary
from pytest_negativa.storage.atomic import TEMPORARY_SUFFIX, write_atomically
from pytest_negativa.storage.records import decode_map, encode_record
from pytest_negativa.storage.system import read_regular

# A change in what the reader finds, or in the format, raises it: old entries are not found then.
_READER_VERSION = 10
_SUFFIX = ".map"
# Bytes of all entries when a cache is opened: above it, those go that were used longest ago.
_LIMIT = 1 << 30


def open_cache(folder: str | None) -> MapCache | None:
    """The cache in the folder of the settings; None for a user without a home."""
    if folder is None:
        return None
    cache = MapCache(Path(folder), _LIMIT)
    cache.keep_limit()
    return cache


class MapCache:
    """A folder of library maps. Failing to read or write it is no error: it only costs time.

    Args:
        directory: the folder; it need not exist.
        limit: bytes that ``keep_limit`` leaves.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    def key(self, source: ByteSource, build_id: str | None) -> str:
        """The key of a library, which changes with its content.

        Raises:
            FormatError: it has no build id, and can't be read to its end.
        """
        state = source.state
        identity = (
            _READER_VERSION,
            *(state.size, state.mtime_ns, state.ctime_ns, state.inode),
            f"build-id {build_id}" if build_id else f"sha256 {source.sha256()}",
        )
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:40]

    def load_summary(
        self, key: str, scope: Scope, devices: Sequence[ComputeCapability]
    ) -> LibrarySummary | None:
        """Load the summary for exactly this scope and devices, if there is one."""
        if (data := _read_frame(self._path(key, scope), 0)) is None:
            return None
        try:
            summary = msgspec.json.decode(data, type=LibrarySummary)
        except UNDECODABLE:
            return None
        # A scope of headers serves every device, so it does not name the summary's devices.
        return summary if summary.devices == tuple(map(str, devices)) else None

    def load_map(self, key: str, scope: Scope, *, with_digest: bool = False) -> LibraryMap | None:
        """Load the map for exactly this scope, if there is one.

        A map of a larger scope would not do: the output of a command must not depend on earlier
        commands.
        """
        path = self._path(key, scope, with_digest=with_digest)
        if (data := _read_frame(path, 1)) is None:
            return None
        try:
            library_map = decode_map(data, str(path))
        except NegativaError:
            return None
        return library_map if library_map.scope == scope else None

    def save(
        self,
        key: str,
        library_map: LibraryMap,
        summary: LibrarySummary,
        *,
        with_digest: bool = False,
    ) -> None:
        """Save a map and its summary; ``with_digest`` says whether the digest was asked for."""
        parts = (msgspec.json.encode(summary), encode_record(library_map))
        data = b"".join(map(zstandard.ZstdCompressor(level=1, write_checksum=True).compress, parts))
        with contextlib.suppress(NegativaError):
            write_atomically(self._path(key, library_map.scope, with_digest=with_digest), data)

    def _path(self, key: str, scope: Scope, *, with_digest: bool = False) -> Path:
        asked = hashlib.sha256(repr((scope, with_digest)).encode()).hexdigest()
        return self._directory / f"{key}.{asked[:16]}{_SUFFIX}"

    def keep_limit(self) -> None:
        """Delete the entries that were used longest ago, and what killed writers left."""
        left = self._limit
        for _used, size, path in sorted(self._iter_entries(), reverse=True):
            left -= size
            if left < 0:
                # Another process may have deleted it already.
                with contextlib.suppress(OSError):
                    Path(path).unlink()

    def _iter_entries(self) -> Iterator[tuple[int, int, str]]:
        """Time of the last use, ns; size, bytes; path."""
        with contextlib.suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    # A killed writer's file is never used again.
                    if entry.name.endswith((_SUFFIX, TEMPORARY_SUFFIX)):
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, entry.path


def _read_frame(path: Path, number: int) -> bytes | None:
    """A frame of an entry; None if it, or one before it, is damaged or not there."""
    content = b""
    try:
        data = read_regular(path)
        # The modification time tells when the entry was last used. It can't be set if the cache
        # came with an image or belongs to another user.
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        for _ in range(number + 1):
            frame = zstandard.ZstdDecompressor().decompressobj()
            content = frame.decompress(data)
            if not frame.eof:
                return None
            data = frame.unused_data
    except (OSError, zstandard.ZstdError):
        return None
    return content
