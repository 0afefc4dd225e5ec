"""The libraries in a wheel, which is a ZIP archive (PEP 427)."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from pytest_negativa.errors import StoreError

MAX_UNPACKED = 8 << 30
"""Bytes: several times the libraries of PyTorch's wheel."""


def unpack_libraries(wheel: Path, folder: Path, limit: int = MAX_UNPACKED) -> None:
    """Unpack the shared libraries of a wheel and its metadata into a folder.

    Files keep their paths in the wheel. None can leave the folder: ``ZipFile.extract`` sees to it.
    None gets larger than the archive says: ``ZipExtFile`` reads no more.

    Args:
        limit: the most bytes to unpack.

    Raises:
        StoreError: it can't be read, is no wheel, is larger than the limit, or the folder can't
            hold it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [
                entry
                for entry in archive.infolist()
                if ".so" in Path(entry.filename).name or ".dist-info/" in entry.filename
            ]
            size = sum(entry.file_size for entry in entries)
            if size > limit:
                raise StoreError(
                    f"{wheel}: not unpacked: its libraries would take {size:,} bytes, the "
                    f"limit is {limit:,} bytes; unpack it yourself and name the folder"
                )
            for entry in entries:
                archive.extract(entry, folder)
    except FileNotFoundError as e:
        raise StoreError(f"{wheel}: not found") from e
    except (
        OSError,
        EOFError,
        zlib.error,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as e:
        raise StoreError(f"{wheel}: cannot be unpacked to {folder}: {e or 'it is damaged'}") from e
