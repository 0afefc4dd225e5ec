"""Folders that other users can write to: where root refuses to work; modes of log folders.

Processes of other users write their logs into some, or load copies from there. Root must not work
in others: a user who can write to a folder can put a link, another file or another folder into the
place of a name, while a process of root works with that name.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from collections.abc import Collection
from pathlib import Path

from pytest_negativa.errors import ReconstructError, refusing

ALONE = "NEGATIVA_NO_OTHER_USERS"
"""A variable: 1 says that no other user can do anything on this machine meanwhile."""

_MOST_LINKS = 40  # path_resolution(7)


def refuse_shared(*folders: Path) -> None:
    """As root, refuse folders in which another user can exchange names.

    In a user namespace, the system's root is another user, too: all strangers have one number.

    Args:
        folders: they need not be there yet.

    Raises:
        ReconstructError: another user can, and ``ALONE`` is not set.
    """
    if os.geteuid() != 0 or os.environ.get(ALONE) == "1":
        return
    for folder in folders:
        if (reason := why_shared(folder, {0})) is not None:
            where = "" if str(folder) in reason else f"{folder}: "
            raise ReconstructError(
                f"{where}{reason}: who can write there can make root change any file; run negativa "
                f"as its owner if that is another user, or set {ALONE}=1 if nobody else can get "
                "in (an image build)"
            )


def why_shared(folder: Path, owners: Collection[int], within: Collection[Path] = ()) -> str | None:
    """Users, but some, who can exchange names in a folder, or exchange the folder; None: nobody.

    Each folder and each link that the kernel passes on the way counts.

    Args:
        folder: it need not be there yet.
        owners: users.
        within: folders that don't matter, such as those around another one, too; real paths.
    """
    place, ahead, links = Path(), [*reversed(folder.absolute().parts)], 0
    # The kernel passes 40 links and opens nothing behind more.
    while ahead and links <= _MOST_LINKS:
        name = ahead.pop()
        place = place.parent if name == ".." else place / name
        try:
            status = place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if place not in within and status.st_uid not in owners:
            return f"{place} belongs to user {status.st_uid}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            ahead += reversed(place.readlink().parts)
            place = place.parent
            continue
        # With the sticky bit, nobody can exchange what belongs to others.
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_open and place not in within and not (ahead and status.st_mode & stat.S_ISVTX):
            return who_may_write(place, status)
    return None


def who_may_write(place: Path, status: os.stat_result) -> str:
    """Users, but its owner, who may write to a folder, and the way out, for messages."""
    way, who = "; chmod go-w", "other users"
    if status.st_mode & stat.S_ISVTX:
        way = "; name a folder in it that its owner alone may write to"
    elif status.st_mode & stat.S_ISGID:
        way = ""  # The system, or an administrator, shares it with the group.
    if not status.st_mode & stat.S_IWOTH:
        who = f"group {status.st_gid}"
        with contextlib.suppress(KeyError):
            who = f"group {grp.getgrgid(status.st_gid).gr_name}"
    return f"{who} may write to {place} (mode {stat.S_IMODE(status.st_mode):o}{way})"


def make_folder(folder: Path) -> None:
    """Make a folder and those around it.

    Raises:
        ReconstructError: it can't be made, or see ``refuse_shared``.
    """
    refuse_shared(folder)
    with refusing(folder, "made", ReconstructError):
        folder.mkdir(parents=True, exist_ok=True)
    # Another user may have made one of them meanwhile.
    refuse_shared(folder)


def make_logs_folder(logs: Path, base: Path) -> None:
    """Make the folder, below ``base``, in which processes of any user write their logs.

    The folders from ``base`` down become passable for other users. The folders above stay as they
    are: processes of a user that can't pass them leave no log.

    Raises:
        StoreError: it can't be created.
    """
    with refusing(logs, "created"):
        logs.mkdir(parents=True, exist_ok=True)
        set_mode(logs, 0o1777)
    make_passable(logs.parent, base)


def make_passable(folder: Path, base: Path) -> None:
    """Let other users pass the folders from ``folder`` up to ``base``, if this user may."""
    top = Path(base).resolve()
    inner = Path(folder).resolve()
    if not inner.is_relative_to(top):
        return
    # What a link leads to is the user's: only what lies in it was made here.
    outside = {top} if Path(base).is_symlink() else set()
    for passed in {inner, *(p for p in inner.parents if p.is_relative_to(top))} - outside:
        with contextlib.suppress(OSError):
            set_mode(passed, 0o011, add=True)


def set_mode(path: Path, mode: int, *, add: bool = False) -> None:
    """Set a mode, or add to it; never that of what a link in the place of ``path`` leads to.

    Raises:
        OSError: it can't be set.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        before = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if before | mode != before or not add:
            os.fchmod(descriptor, before | mode if add else mode)
    finally:
        os.close(descriptor)
