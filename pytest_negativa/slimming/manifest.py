"""``negativa-slim.json``: kept originals, spares, distributions uninstalled or upgraded since."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import (
    SlimManifest,
    SlimmedFile,
)
from pytest_negativa.slimming.tree import MANIFEST_NAME, Records, staged_name
from pytest_negativa.storage.atomic import sync_folder, write_atomically
from pytest_negativa.storage.records import decode_versioned
from pytest_negativa.storage.system import read_regular

# In JSON, behind an even number of backslashes.
_ZERO = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def load_manifest(root: Path) -> SlimManifest:
    """Read the manifest of a folder; without one, it is empty.

    Raises:
        StoreError: it can't be read, is damaged, or of another format.
    """
    path = root / MANIFEST_NAME
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return SlimManifest(slimmed={})
    except OSError as e:
        hint = "" if path.is_file() else "; move it away"
        raise StoreError(f"{path}: cannot be read: {e.strerror}{hint}") from e
    manifest = decode_versioned(
        data,
        SlimManifest,
        origin=str(path),
        what="a manifest of negativa slim",
        remedy="use the release of pytest-negativa that wrote it; if it is damaged, copy it from a "
        "backup, or move it away: then undo puts back libraries that have a spare, and others come "
        "back by installing them again",
    )
    if _ZERO.search(data) is not None:
        # No path has one, and Python's functions raise ValueError for it.
        raise StoreError(f"{path}: not a manifest of negativa slim: a zero byte in a text")
    names = (name for entry in manifest.slimmed.values() for name in entry.names)
    for name in (*manifest.slimmed, *names):
        # The manifest may have come with an image from elsewhere.
        if not name or os.path.isabs(name) or ".." in name.split("/"):  # noqa: PTH117
            raise StoreError(f"{path}: names {name!r}, which is not below its folder")
    return manifest


def save_manifest(root: Path, manifest: SlimManifest, token: str) -> None:
    """Write the manifest, or remove it when nothing is left in it. It is on disk then.

    Args:
        root: the folder.
        manifest: what to write.
        token: of the run.

    Raises:
        StoreError: it can't be written; then it is as it was.
    """
    path = root / MANIFEST_NAME
    if manifest.slimmed or manifest.run:
        data = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)
        write_atomically(path, data + b"\n", hidden=staged_name(path, token), durable=True)
        return
    with refusing(path, "removed"):
        path.unlink(missing_ok=True)
        sync_folder(root)


def may_be_kept(entry: SlimmedFile) -> bool:
    """Whether the original of a library was kept, and is not known to be gone.

    The folder of originals may not be mounted now.
    """
    folder, name = os.path.split(entry.original or "")
    try:
        return bool(name) and name in os.listdir(folder)  # noqa: PTH208
    except OSError:
        return True


def spares_of(entries: Iterable[SlimmedFile]) -> set[Path]:
    """The spares of libraries, where slim put them."""
    return {Path(entry.spare) for entry in entries if entry.spare is not None}


def is_uninstalled(root: Path, entry: SlimmedFile) -> bool:
    """Whether a distribution that had the library is gone, and not away with all of its site."""
    gone = [_owner_of(Path(os.path.normpath(root / record))) for record in entry.records]
    return any(not one.exists() and any(one.parent.glob(f"*{one.suffix}")) for one in gone)


def _owner_of(record: Path) -> Path:
    """The file of conda, or pip's folder of RECORD, which goes with its distribution."""
    return record if record.suffix else record.parent


def is_reinstalled(entry: SlimmedFile, records: Records) -> bool:
    """Whether RECORD now has another file than the one that was slimmed."""
    known = {record_digest(entry.sha256), record_digest(entry.original_sha256)}
    return bool(records) and not known & records.keys()
