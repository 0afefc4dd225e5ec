"""Atomic replacement of a file at each of its names; kept originals; another program's file stays.

No file is ever written to: names are given to another file, so a process that has the old file
mapped keeps it. Another process, such as pip, may put a file of its own in that place meanwhile.
Then that file stays: the place is looked at right before its name is taken.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource, digest_of, opened
from pytest_negativa.models.file_state import FileState
from pytest_negativa.rewriting.layout import Edits, FileLayout, state_at, write_layout
from pytest_negativa.slimming.tree import ORIGINALS_MARK, staged_name
from pytest_negativa.storage.atomic import NewFile, copy_metadata, set_mtime, sync_file, sync_folder
from pytest_negativa.storage.shared_folders import make_folder

_OTHER_FILE_SYSTEM = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}


class TakenError(ReconstructError):
    """Another process put another file into a place, or removed the file there."""

    def __init__(self, path: Path, what: str = "another file took its place") -> None:
        super().__init__(
            f"{path}: {what} while negativa worked, so it was left as it is; run the command again"
        )


def replace_all(
    staged: Path,
    places: Mapping[Path, FileState | None],
    token: str,
    *,
    one_of_many: bool = False,
) -> None:
    """Let all names lead to the new file, one after the other, each at once.

    The new file is on disk before it gets a name, and so are the names when this returns.

    Args:
        staged: the new file; its name is gone afterwards.
        places: the names, with the state of the file that each leads to; None if there is none.
        token: of the run.
        one_of_many: leave it to the caller to force the file and its names to disk.

    Raises:
        TakenError: a name leads to another file; this name and those behind it were left.
        ReconstructError: some could not be replaced.
    """
    first, *others = places
    try:
        if not one_of_many:
            sync_file(staged)
        # Taking one name of a file changes the file's time of change.
        for place, state in places.items():
            look(place, state, by_ctime=True)
        take(staged, first, places[first])
        for place in others:
            link(first, place, places[place], token)
        for folder in () if one_of_many else {place.parent for place in places}:
            sync_folder(folder)
    except OSError as e:
        raise ReconstructError(f"{e.filename or first}: cannot be replaced: {e.strerror}") from e
    finally:
        staged.unlink(missing_ok=True)


def link(path: Path, place: Path, state: FileState | None, token: str) -> None:
    """Let ``place``, which leads to a file of this state, lead to the file ``path``.

    No link leads from one mount to another, even of the same file system: ``place`` gets a copy.

    Args:
        path: the new file.
        place: the name.
        state: None if the name leads to no file.
        token: of the run.

    Raises:
        TakenError: it leads to another file.
        NegativaError: the copy can't be made.
        OSError: it can't.
    """
    if is_same_file(state_at(place), state_at(path)):
        return  # A bind mount shows one name in two folders.
    new = staged_name(place, token)
    _link_or_copy(path, new)
    take(new, place, state)


def _link_or_copy(original: Path, target: Path, hidden: Path | None = None) -> None:
    try:
        os.link(original, target)
    except OSError as e:
        if e.errno not in _OTHER_FILE_SYSTEM:
            raise
        copy_file(original, target, hidden)


def take_out(place: Path, state: FileState) -> None:
    """Remove a name of a file.

    Args:
        place: the name.
        state: of the file that it leads to.

    Raises:
        TakenError: it leads to another file, which stays.
        ReconstructError: it can't be removed.
    """
    with refusing(place, "removed", ReconstructError):
        look(place, state, by_ctime=False)
        place.unlink()


def take(new: Path, place: Path, state: FileState | None) -> None:
    """Let ``place`` lead to the file ``new``, whose name goes.

    Args:
        new: the new file, in the same folder.
        place, state: see ``link``.

    Raises:
        TakenError: it leads to another file, which stays.
        OSError: it can't be renamed.
    """
    try:
        look(place, state, by_ctime=False)
        new.replace(place)
    finally:
        # Renaming a link onto another one of the same file does nothing, and leaves both.
        new.unlink(missing_ok=True)


def look(place: Path, state: FileState | None, *, by_ctime: bool) -> FileState | None:
    """Refuse a place that leads to another file than that of a state.

    Args:
        place: the name.
        state: None if it led to no file.
        by_ctime: compare also the time of change, as long as nothing here changed it.

    Returns:
        Its state now.

    Raises:
        TakenError: it does.
    """
    now = state_at(place)
    if now is None and state is not None:
        raise TakenError(place, "it was removed")
    if now != state and (by_ctime or _content(now) != _content(state)):
        raise TakenError(place)
    return now


def _content(state: FileState | None) -> FileState | None:
    # Naming a file, or removing a name, changes its time of change.
    return None if state is None else replace(state, ctime_ns=0)


def is_same_file(one: FileState | None, other: FileState | None) -> bool:
    """Whether two states are of one file."""
    return (
        one is not None
        and other is not None
        and (one.device, one.inode) == (other.device, other.inode)
    )


def keep_original(
    original: Path,
    target: Path,
    token: str,
    known: FileState | None,
    *,
    one_of_many: bool = False,
) -> None:
    """Let ``target`` be the same file as ``original``, or else a copy with all its attributes.

    Args:
        original: the library.
        target: named by the SHA-256 of the original, in hex.
        token: of the run.
        known: the state in which the library has that digest; None if that is not known.
        one_of_many: leave it to the caller to force ``target`` and its name to disk.

    Raises:
        TakenError: the library is no longer the file of that digest.
        ReconstructError: it can't be written.
    """
    with refusing(target.parent, "written", ReconstructError):
        make_folder(target.parent)
        (target.parent / ORIGINALS_MARK).touch()
        # From an earlier run: the name says what it is, and undoing checks that.
        # One that can't be read stays: it may be the only one.
        if target.exists():
            with ByteSource(target) as kept:
                if kept.sha256() == target.name:
                    return
        target.unlink(missing_ok=True)
        _link_or_copy(original, target, staged_name(target, token))
        # Another file may have taken the place since, and a copy may have read two.
        is_known = known is not None and _content(state_at(target)) == _content(known)
        if not is_known and digest_of(target) != target.name:
            target.unlink()
            raise TakenError(original)
        if not one_of_many:
            sync_file(target)
            sync_folder(target.parent)


def copy_file(
    original: Path,
    target: Path,
    hidden: Path | None = None,
    *,
    like: Path | None = None,
    mtime_ns: int | None = None,
) -> None:
    """Copy a file with its owner, mode, attributes and times; it gets its name when complete.

    Args:
        original: the file.
        target: the copy.
        hidden: see ``storage.atomic.NewFile``.
        like: another file, whose owner, mode, attributes and times the copy gets.
        mtime_ns: what the copy gets instead, in ns since the epoch.

    Raises:
        OSError: it can't be written.
        NegativaError: it can't be read.
    """
    with (
        ByteSource(original) as source,
        opened(like or source) as model,
        NewFile(target, hidden=hidden) as new,
    ):
        write_layout(FileLayout.of_copy(Edits(source.size)), source, new.fd)
        copy_metadata(model.fileno(), new.fd, same_bytes=model is source)
        if mtime_ns is not None:
            set_mtime(new.fd, mtime_ns)
        new.publish()
