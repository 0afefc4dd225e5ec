"""The libraries in a wheel, which is a ZIP archive (PEP 427)."""

from __future__ import annotations

import zipfile
from pathlib import Path

from pytest_negativa.errors import StoreError


def unpack_libraries(wheel: Path, folder: Path) -> None:
    """Unpack the shared libraries of a wheel and its metadata into a folder.

    Files keep their paths in the wheel. None can leave the folder: ``ZipFile.extract`` sees to it.

    Raises:
        StoreError: it can't be read, is no wheel, or the folder can't hold it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if ".so" in Path(entry.filename).name or ".dist-info/" in entry.filename:
                    archive.extract(entry, folder)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as e:
        raise StoreError(f"{wheel}: cannot be unpacked to {folder}: {e}") from e
