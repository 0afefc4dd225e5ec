"""A new file takes the place of an old one, under all its names; and originals are kept.

No file is ever written to: names are given to another file, so a process that has the old file
mapped keeps it. Another process, such as pip, may put a file of its own in that place meanwhile.
Then that file stays. The old file is looked at right before its name is taken, and again when it
came out of the place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.rewriting.edits import Edits
from pytest_negativa.rewriting.layout import FileLayout, write_layout
from pytest_negativa.slimming.tree import ORIGINALS_MARK, staged_name, swap_name
from pytest_negativa.storage.atomic import new_file, sync_file, sync_folder
from pytest_negativa.storage.attributes import copy_metadata, set_mtime
from pytest_negativa.storage.shared_folders import make_folder

_OTHER_FILE_SYSTEM = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}
_LONGEST_NAME = 255  # bytes; linux/limits.h


class TakenError(ReconstructError):
    """Another process put another file into a place, or removed the file there."""

    def __init__(self, path: Path, what: str = "another file took its place") -> None:
        super().__init__(
            f"{path}: {what} while negativa worked, so it was left as it is; run the command again"
        )


def replace_all(staged: Path, places: Mapping[Path, FileState | None], token: str) -> None:
    """Let all names lead to the new file, one after the other, each at once.

    The new file is on disk before it gets a name, and so are the names when this returns.

    Args:
        staged: the new file; its name is gone afterwards.
        places: the names, with the state of the file that each leads to; None if there is none.
        token: of the run.

    Raises:
        TakenError: a name leads to another file; this name and those behind it were left.
        ReconstructError: some could not be replaced.
    """
    first, *others = places
    touched = set()
    try:
        sync_file(staged)
        swap = swap_name(first, token)
        staged.rename(swap)
        _take(swap, first, places[first], by_ctime=True)
        touched.add(_inode(places[first]))
        for place in others:
            inode = _inode(places[place])
            # Taking one name of a file changes the file's time of change.
            link(first, place, places[place], token, by_ctime=inode not in touched)
            touched.add(inode)
        for folder in {place.parent for place in places}:
            sync_folder(folder)
    except OSError as e:
        raise ReconstructError(f"{e.filename or first}: cannot be replaced: {e.strerror}") from e
    finally:
        staged.unlink(missing_ok=True)


def link(
    path: Path, place: Path, state: FileState | None, token: str, *, by_ctime: bool = False
) -> None:
    """Let ``place``, which leads to a file of this state, lead to the file ``path``.

    No link leads from one mount to another, even of the same file system: ``place`` gets a copy.

    Args:
        path: the new file.
        place: the name.
        state: None if the name leads to no file.
        token: of the run.
        by_ctime: compare also the time of change, which naming the old file changes.

    Raises:
        TakenError: it leads to another file.
        NegativaError: the copy can't be made.
        OSError: it can't.
    """
    if _inode_at(place) == _inode_at(path):
        return  # A bind mount shows one name in two folders.
    swap = swap_name(place, token)
    try:
        os.link(path, swap)
    except OSError as e:
        if e.errno not in _OTHER_FILE_SYSTEM:
            raise
        copy_file(path, swap, staged_name(place, token))
    _take(swap, place, state, by_ctime=by_ctime)


def take_out(place: Path, state: FileState, token: str, *, by_ctime: bool = True) -> None:
    """Remove a name of a file.

    Args:
        place: the name.
        state: of the file that it leads to.
        token: of the run.
        by_ctime: compare also the time of change, which removing another name changes.

    Raises:
        TakenError: it leads to another file, which stays.
        OSError: it can't be removed.
    """
    try:
        if not _leads_to(place, state, by_ctime=by_ctime):
            raise TakenError(place)
        swap = swap_name(place, token)
        if len(os.fsencode(swap.name)) > _LONGEST_NAME or is_overlay(place.parent):
            place.unlink()
            return
        place.rename(swap)
    except FileNotFoundError:
        raise TakenError(place, "it was removed") from None
    if not _leads_to(swap, state, by_ctime=False):
        take_free(swap, place)
        swap.unlink(missing_ok=True)
        raise TakenError(place)
    swap.unlink()


def give_back(swap: Path, place: Path, ours: FileState) -> None:
    """Put a file of another process back that came out of its place in an exchange.

    Args:
        swap: leads to that file, and afterwards to a useless one: ours, or a file that the other
            process has replaced itself.
        place: where it belongs.
        ours: the state of the file that this process had put there.

    Raises:
        OSError: it can't.
    """
    put = _inode(ours)
    while (there := _inode_at(place)) == put:
        came = _inode_at(swap)
        with contextlib.suppress(FileNotFoundError):
            exchange(swap, place)
            if _inode_at(swap) == put:
                return
            # The other process was quicker: what came out now is its newer file.
            put = came
    if there is None:
        # If it is there again, that is the newer file.
        with contextlib.suppress(FileExistsError):
            os.link(swap, place)


def _take(swap: Path, place: Path, state: FileState | None, *, by_ctime: bool) -> None:
    """Let ``place`` lead to the file ``swap``, whose name goes."""
    ours = FileState.of(swap.lstat())
    exchanged = False
    try:
        if state is None:
            take_free(swap, place)
        elif not _leads_to(place, state, by_ctime=by_ctime):
            raise TakenError(place)
        else:
            exchanged = exchange(swap, place)
            if not exchanged:
                swap.replace(place)
    except FileNotFoundError:
        raise TakenError(place, "it was removed") from None
    finally:
        if not exchanged:
            # Renaming a link onto another one of the same file does nothing, and leaves both.
            swap.unlink(missing_ok=True)
    if exchanged and state is not None:
        # The exchange itself changes the time of change.
        taken = not _leads_to(swap, state, by_ctime=False)
        if taken:
            give_back(swap, place, ours)
        swap.unlink(missing_ok=True)
        if taken:
            raise TakenError(place)


def take_free(swap: Path, place: Path) -> None:
    """Give a file the name ``place``, which leads to none; the name ``swap`` may stay or go.

    Raises:
        TakenError: another file has the name.
        OSError: it can't be given.
    """
    try:
        os.link(swap, place)
    except FileExistsError:
        raise TakenError(place) from None
    except OSError as e:
        # A file system without links, such as FAT.
        if e.errno not in _OTHER_FILE_SYSTEM:
            raise
        if os.path.lexists(place):
            raise TakenError(place) from None
        swap.rename(place)


def _leads_to(place: Path, state: FileState, *, by_ctime: bool) -> bool:
    now = FileState.of(place.lstat())
    return now == state if by_ctime else _content(now) == _content(state)


def _content(state: FileState) -> tuple[int, ...]:
    return state.device, state.inode, state.size, state.mtime_ns


def _inode(state: FileState | None) -> tuple[int, int] | None:
    return None if state is None else (state.device, state.inode)


def is_same_file(one: FileState | None, other: FileState | None) -> bool:
    """Whether two states are of one file."""
    return one is not None and _inode(one) == _inode(other)


def _inode_at(path: Path) -> tuple[int, int] | None:
    try:
        return _inode(FileState.of(path.lstat()))
    except FileNotFoundError:
        return None


def keep_original(
    original: Path,
    target: Path,
    token: str,
    known: FileState | None,
    *,
    one_of_many: bool = False,
) -> FileState | None:
    """Let ``target`` be the same file as ``original``, or else a copy with all its attributes.

    Args:
        original: the library.
        target: named by the SHA-256 of the original, in hex.
        token: of the run.
        known: the state in which the library has that digest; None if that is not known.
        one_of_many: leave it to the caller to force ``target`` and its name to disk.

    Returns:
        If it was linked, which changes its time of change: the state of the original.

    Raises:
        TakenError: the library is no longer the file of that digest.
        ReconstructError: it can't be written.
    """
    with refusing(target.parent, "written", ReconstructError):
        make_folder(target.parent)
        (target.parent / ORIGINALS_MARK).touch()
        # From an earlier run: the name says what it is, and undoing checks that.
        if target.exists() and has_digest(target, target.name):
            return None
        target.unlink(missing_ok=True)
        state = None
        is_known = known is not None and _leads_to(original, known, by_ctime=True)
        try:
            os.link(original, target)
            state = FileState.of(target.lstat())
        except OSError as e:
            if e.errno not in _OTHER_FILE_SYSTEM:
                raise
            copy_file(original, target, staged_name(target, token))
        # Another file may have taken the place since, and a copy may have read two.
        is_known &= state is not None and known is not None and _content(state) == _content(known)
        if not is_known and not has_digest(target, target.name):
            target.unlink()
            raise TakenError(original)
        if not one_of_many:
            sync_file(target)
            sync_folder(target.parent)
    return state


def has_digest(path: Path, sha256: str) -> bool:
    """Whether a file has this SHA-256, in hex.

    Raises:
        FormatError: it can't be read.
    """
    with ByteSource(path) as source:
        return source.sha256() == sha256


def copy_file(
    original: Path,
    target: Path,
    hidden: Path | None = None,
    *,
    like: Path | None = None,
    mode: int | None = None,
    mtime_ns: int | None = None,
) -> None:
    """Copy a file with its owner, mode, attributes and times; it gets its name when complete.

    Args:
        original: the file.
        target: the copy.
        hidden: see ``storage.atomic.new_file``; a file of that name is replaced.
        like: another file, whose owner, mode, attributes and times the copy gets.
        mode, mtime_ns: what the copy gets instead, as ``chmod`` takes it and in ns since the epoch.

    Raises:
        OSError: it can't be written.
        NegativaError: it can't be read.
    """
    if hidden is not None:
        hidden.unlink(missing_ok=True)
    with ByteSource(original) as source, new_file(target, hidden=hidden) as new:
        write_layout(FileLayout.of_copy(Edits(source.size)), source, new.fd)
        if like is None:
            copy_metadata(source.fileno(), new.fd, same_bytes=True)
        else:
            with ByteSource(like) as other:
                copy_metadata(other.fileno(), new.fd)
        if mode is not None:
            os.fchmod(new.fd, mode)
        if mtime_ns is not None:
            set_mtime(new.fd, mtime_ns)
        new.publish()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 1 << 1
# linux/magic.h. f_type is the first field of struct statfs on 64-bit machines.
_OVERLAYFS_MAGIC = 0x794C7630
_STATFS_SIZE = 512
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def exchange(first: Path, second: Path) -> bool:
    """Let each of two names lead to the other's file, at once.

    Returns:
        False if the file system can't do it, or only at a high price; then nothing was done.

    Raises:
        OSError: one of the names is gone, or the folder can't be written.
    """
    libc = _libc()
    if not hasattr(libc, "renameat2") or is_overlay(first.parent):
        return False
    # As os.rename does.
    sys.audit("os.rename", os.fspath(first), os.fspath(second), -1, -1)
    names = os.fsencode(first), os.fsencode(second)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), os.fspath(second))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_overlay(folder: Path) -> bool:
    """Whether renaming a file in the folder may copy it from an image layer first."""
    libc = _libc()
    buffer = ctypes.create_string_buffer(_STATFS_SIZE)
    if libc.statfs(os.fsencode(folder), buffer):
        return False
    return int.from_bytes(buffer.raw[:8], sys.byteorder) == _OVERLAYFS_MAGIC
