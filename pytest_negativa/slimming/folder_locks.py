"""Locks of the folders that a process slims, so that no other process works there.

The folders themselves are locked, so no lock file is left behind. On a file system without locks,
such as some network file systems, there is no protection.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.storage.locks import find_holders, lock, open_to_lock
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
                stack.enter_context(held(folder, shared=is_shared[folder], inner=roots))
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
    if {folder, *folder.parents}.intersection(roots):
        yield
        return
    with held(folder):
        yield


def is_held(folder: Path) -> bool:
    """Whether another process holds a folder; does not wait."""
    try:
        with open_to_lock(folder, _FOLDER) as descriptor:
            return not lock(descriptor, shared=True, wait=False)
    except OSError:
        return False


@contextlib.contextmanager
def held(folder: Path, *, shared: bool = False, inner: Sequence[Path] = ()) -> Iterator[None]:
    """Hold one folder; see ``hold``.

    Args:
        folder: the folder.
        shared: other processes may hold it so, too.
        inner: the folders for whose sake a parent is locked. A lock of a user who can't write there
            is no slim at work, and any user can lock any folder that they can read. Empty: the
            folder itself.

    Raises:
        ReconstructError: it can't be opened.
    """
    with contextlib.ExitStack() as stack:
        with refusing(folder, "opened", ReconstructError):
            descriptor = stack.enter_context(open_to_lock(folder, _FOLDER))
        with contextlib.suppress(OSError):
            if not lock(descriptor, shared=shared, wait=False):
                _wait(folder, descriptor, shared=shared, inner=inner)
        yield


def _wait(folder: Path, descriptor: int, *, shared: bool, inner: Sequence[Path]) -> None:
    """Lock a folder that another process holds, or go on without if that process is harmless."""
    if (idle := _holder_without_access(descriptor, inner or (folder,))) is not None:
        sys.stderr.write(
            f"negativa: process {idle} of another user has locked {folder}; going on, since that "
            "user can't write to what is slimmed\n"
        )
        sys.stderr.flush()
        return
    # It may be the script that runs this command ("flock DIR negativa slim ...").
    sys.stderr.write(f"negativa: waiting for a process that has locked {folder}\n")
    sys.stderr.flush()
    lock(descriptor, shared=shared)


def _holder_without_access(descriptor: int, folders: Sequence[Path]) -> int | None:
    """The process that holds a lock, if all holders belong to users who can't write to folders."""
    import psutil  # Takes 15 ms, and locks are mostly free.

    holders = find_holders(descriptor)
    for pid in holders:
        try:
            user = psutil.Process(pid).uids().effective
        except psutil.Error:
            return None  # It has ended meanwhile.
        if user in (0, os.geteuid()):
            return None
        for status in (folder.stat() for folder in folders):
            if status.st_uid == user or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
    return holders[0] if holders else None
