"""Locks of the folders that a process slims, so that no other process works there.

The folders themselves are locked, so no lock file is left behind. On a file system without locks,
such as some network file systems, there is no protection.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.storage.flock import find_holders, lock, open_to_lock
from pytest_negativa.storage.shared_folders import refuse_shared

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextlib.contextmanager
def hold(*roots: Path) -> Iterator[None]:
    """Wait until no other process works in these folders, and keep others out.

    Parent folders are locked shared, always from the outermost inwards, which rules out deadlock.

    Args:
        roots: real paths.

    Raises:
        ReconstructError: a folder can't be opened, or another user can exchange what root works on.
    """
    manifests = (root / MANIFEST_NAME for root in roots)
    refuse_shared(*roots, *manifests)
    is_shared = {folder: True for root in roots for folder in root.parents}
    is_shared.update(dict.fromkeys(roots, False))
    with contextlib.ExitStack() as stack:
        for folder in sorted(is_shared):
            # A user who may not read a parent can't slim it either.
            with contextlib.suppress(*([ReconstructError] if is_shared[folder] else [])):
                stack.enter_context(held(folder, shared=is_shared[folder]))
        yield


@contextlib.contextmanager
def hold_metadata(folder: Path, *roots: Path) -> Iterator[None]:
    """Hold the metadata of a distribution while ``roots`` are held.

    A process that slims a part of a site writes to RECORD files beside that part. They may lie in
    another of the roots (``site-packages/*``); then the process holds them already.

    Raises:
        ReconstructError: see ``hold``.
    """
    refuse_shared(folder)
    is_held = {folder, *folder.parents}.intersection(roots)
    with contextlib.nullcontext() if is_held else held(folder):
        yield


@contextlib.contextmanager
def held(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold one folder; see ``hold``.

    Args:
        folder: the folder.
        shared: other processes may hold it so, too.

    Raises:
        ReconstructError: it can't be opened.
    """
    with open_to_lock(folder, _FOLDER, ReconstructError) as descriptor:
        with contextlib.suppress(OSError):
            if not lock(descriptor, shared=shared, wait=False):
                # It may be the script that runs this command ("flock DIR negativa slim ...").
                pids = ", ".join(map(str, find_holders(descriptor)))
                sys.stderr.write(
                    f"negativa: waiting for a process that has locked {folder}"
                    f"{f' (process {pids})' if pids else ''}\n"
                )
                sys.stderr.flush()
                lock(descriptor, shared=shared)
        yield
