"""Sizes of files on disk and in archives, and their pages in the page cache (cachestat)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, cast

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.measurement import FileSizes
from pytest_negativa.models.spans import round_up

_LEVEL = 3


def measure_sizes(files: Sequence[tuple[str, Path]]) -> FileSizes:
    """Measure files, each given with its name in the archive, by reading each once.

    The archive depends on names and contents alone, not on times and owners.

    Raises:
        NegativaError: a file can't be read.
    """
    import zstandard  # It takes 20 ms.

    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    apparent = allocated = 0
    try:
        with (
            Path(os.devnull).open("wb") as nothing,
            compressor.stream_writer(nothing) as packed,
            tarfile.open(
                fileobj=cast("IO[bytes]", packed), mode="w|", format=tarfile.PAX_FORMAT
            ) as archive,
        ):
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
    return FileSizes(
        files=len(files),
        apparent_bytes=apparent,
        allocated_bytes=allocated,
        # tarfile adds zeros up to a whole record.
        tar_bytes=round_up(archive.offset, tarfile.RECORDSIZE),
        tar_zstd_bytes=packed.tell(),
    )


_PAGE = os.sysconf("SC_PAGE_SIZE")
# asm-generic/unistd.h; the same number on all architectures. Since Linux 6.5.
_SYS_CACHESTAT = 451


class _Range(ctypes.Structure):
    """struct cachestat_range of linux/mman.h; length 0: to the end."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    """struct cachestat of linux/mman.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, except for pages that a process has mapped.

    posix_fadvise(2), POSIX_FADV_DONTNEED: pages that are written out, mapped by no process and
    not locked.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # A copy may just have been made.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of files in the page cache, in whole pages, by cachestat(2).

    None if the kernel is older than 6.5, or the user neither owns a file nor may write it.
    """
    pages = [_cached_pages(path) for path in paths]
    return None if None in pages else sum(p for p in pages if p is not None) * _PAGE


def _cached_pages(path: Path) -> int | None:
    found = _Statistics()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with path.open("rb", buffering=0) as file:
            failed = libc.syscall(
                ctypes.c_long(_SYS_CACHESTAT),
                file.fileno(),
                ctypes.byref(_Range(0, 0)),
                ctypes.byref(found),
                0,
            )
    except OSError:
        return None
    return None if failed else int(found.cached)
