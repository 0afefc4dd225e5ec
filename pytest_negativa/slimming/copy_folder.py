"""Copies a folder without some of its files. Symbolic links and hard links stay links."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.slimming.replace import copy_file
from pytest_negativa.slimming.tree import MANIFEST_NAME, is_unfinished_copy, temporary_at
from pytest_negativa.storage.shared_folders import refuse_shared


def copy_folder(source: Path, target: Path, skipped: Collection[str]) -> None:
    """Copy what is below ``source`` into ``target``.

    Sockets, pipes, devices and files that killed runs left are not copied. Files that the target
    has already stay.

    Args:
        source: the folder to copy.
        target: the copy, which is made if needed.
        skipped: names below ``source`` that are not copied.

    Raises:
        ReconstructError: something can't be read or written, or see ``refuse_shared``.
    """
    copied: dict[tuple[int, int], Path] = {}
    try:
        for folder, folders, files in os.walk(source, onerror=_raise):
            folders[:] = [name for name in folders if not is_unfinished_copy(name)]
            refuse_shared(Path(folder))
            below = os.path.relpath(folder, source)
            new = target / below
            new.mkdir(parents=True, exist_ok=True)
            links = [name for name in folders if Path(folder, name).is_symlink()]
            for name in (*links, *files):
                if (
                    temporary_at(Path(name)) is None
                    and os.path.normpath(os.path.join(below, name)) not in skipped
                ):
                    _copy_one(Path(folder, name), new / name, copied)
    except OSError as e:
        raise ReconstructError(f"{e.filename or target}: cannot be copied: {e.strerror}") from e


def copy_attributes(source: Path, target: Path) -> None:
    """Give the folders of a copy the modes and times of the originals.

    Call it last: a folder may become read-only, and its times change with its files.

    Raises:
        ReconstructError: something can't be read or written.
    """
    try:
        # By the copy, which lacks the folders that were not copied.
        for folder, _, _ in os.walk(target, topdown=False, onerror=_raise):
            shutil.copystat(source / os.path.relpath(folder, target), folder)
    except OSError as e:
        raise ReconstructError(f"{e.filename or target}: cannot be copied: {e.strerror}") from e


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder that was to become a slimmed copy; its manifest goes last.

    Raises:
        OSError: something can't be removed.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _copy_one(source: Path, target: Path, copied: dict[tuple[int, int], Path]) -> None:
    status = source.lstat()
    if os.path.lexists(target):
        return
    if stat.S_ISLNK(status.st_mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISREG(status.st_mode):
        first = copied.setdefault((status.st_dev, status.st_ino), target)
        if first is target:
            copy_file(source, target)
        else:
            os.link(first, target)


def _raise(error: OSError) -> None:
    raise error
