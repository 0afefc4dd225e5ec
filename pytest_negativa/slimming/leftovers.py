"""Removes the temporary files that killed runs left. No other file is ever removed.

A temporary file is ours if its name has the token of the run that the manifest of its folder notes.
A run may have been killed right after an exchange: then the name may lead to a file that another
process had put into the place, and that file goes back.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError
from pytest_negativa.gpucode.slimmed import size_before
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.slimming import RemovedFile, SlimManifest, SlimmedFile
from pytest_negativa.slimming.manifest import is_part_of_manifest, load_manifest
from pytest_negativa.slimming.replace import give_back
from pytest_negativa.slimming.tree import (
    MANIFEST_NAME,
    STAGED_SUFFIX,
    Temporary,
    Tree,
    digest_of,
)
from pytest_negativa.storage.shared_folders import refuse_shared


def remove_leftovers(tree: Tree) -> bool:
    """Remove what killed runs left in a folder that this process holds.

    Returns:
        Whether a library may be another one than the tree says, or have another time of change: a
        leftover may be one more name of its file.

    Raises:
        StoreError: the manifest can't be read.
    """
    if not tree.leftovers:
        return False
    manifest = load_manifest(tree.root)
    entries = {name: entry for entry in manifest.slimmed.values() for name in entry.names}
    changed = False
    for temporary in tree.leftovers:
        # A folder that can't be written is the business of the work that follows.
        with contextlib.suppress(OSError, ReconstructError):
            refuse_shared(temporary.path.parent)
            if not _is_ours(tree.root, temporary, manifest):
                continue
            if temporary.place is not None:
                name = temporary.place.relative_to(tree.root).as_posix()
                entry = entries.get(name)
                if not (
                    _is_known(temporary.path, entry)
                    or _was_removed(temporary, manifest.removed.get(name))
                ):
                    changed |= _put_back(temporary, entry)
                    continue
            temporary.path.unlink()
            changed = True
    return changed


def _is_ours(root: Path, temporary: Temporary, manifest: SlimManifest) -> bool:
    if temporary.token == manifest.run:
        return True
    # The first thing that a run writes; no manifest has its token then.
    path = temporary.path
    name = f".{MANIFEST_NAME}.{temporary.token}{STAGED_SUFFIX}"
    return path == root / name and is_part_of_manifest(path)


def _is_known(path: Path, entry: SlimmedFile | None) -> bool:
    """Whether a file is a result of slimming, or its original."""
    if entry is None:
        return False
    if digest_of(path) in (entry.sha256, entry.original_sha256):
        return True
    # A library that was slimmed anew: the earlier result came out.
    try:
        with ByteSource(path) as source:
            return size_before(source) == entry.original_size
    except FormatError:
        return False


def _was_removed(temporary: Temporary, entry: RemovedFile | None) -> bool:
    """Whether it is a file of GPU code that a run removed, and another file has its place now."""
    place = temporary.place
    if entry is None or place is None or not place.exists():
        return False
    return digest_of(temporary.path) == entry.sha256


def _put_back(temporary: Temporary, entry: SlimmedFile | None) -> bool:
    """Put a file back that another process had put into the place; it stays if that isn't ours."""
    place = temporary.place
    assert place is not None
    if place.exists():
        if entry is None or digest_of(place) not in (entry.sha256, entry.original_sha256):
            return False
        give_back(temporary.path, place, FileState.of(place.lstat()))
    else:
        temporary.path.rename(place)
        return True
    temporary.path.unlink()
    return True
