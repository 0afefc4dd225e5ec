"""Measures how large files are: on disk, in an archive, and in a compressed archive."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.measurement import FileSizes

_LEVEL = 3


class _Counter:
    """A file that only counts the bytes written to it, before and after compression."""

    def __init__(self) -> None:
        # 20 ms to import.
        import zstandard

        self.plain = self.compressed = 0
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()

    def write(self, data: bytes) -> int:
        self.plain += len(data)
        self.compressed += len(self._compressor.compress(data))
        return len(data)

    def tell(self) -> int:
        return self.plain

    def finish(self) -> None:
        self.compressed += len(self._compressor.flush())


def measure_sizes(files: Sequence[tuple[str, Path]]) -> FileSizes:
    """Measure files, each given with its name in the archive, by reading each once.

    The archive depends on names and contents alone, not on times and owners.

    Raises:
        NegativaError: a file can't be read.
    """
    counter = _Counter()
    apparent = allocated = 0
    try:
        with tarfile.open(
            fileobj=cast("IO[bytes]", counter), mode="w|", format=tarfile.PAX_FORMAT
        ) as archive:
            for name, path in files:
                with path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    entry = tarfile.TarInfo(name.lstrip("/"))
                    entry.size = status.st_size
                    entry.mode = 0o755
                    archive.addfile(entry, file)
                apparent += status.st_size
                # stat(2): in units of 512 bytes, whatever the file system's blocks are.
                allocated += status.st_blocks * 512
    except OSError as e:
        raise NegativaError(f"{e.filename or path}: cannot be read: {e.strerror or e}") from e
    counter.finish()
    return FileSizes(
        files=len(files),
        apparent_bytes=apparent,
        allocated_bytes=allocated,
        tar_bytes=counter.plain,
        tar_zstd_bytes=counter.compressed,
    )
