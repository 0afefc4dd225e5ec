"""A new file in the place of an old one, under all its names; and originals put aside.

Processes that have the old file mapped keep it: names are given to another file, and no file is
ever written to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.slimming.tree import ORIGINALS_MARK, STAGED_SUFFIX

# linux/fs.h: _IOW(0x94, 9, int).
_FICLONE = 0x40049409
_OTHER_FILE_SYSTEM = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}
_NO_ATTRIBUTES = {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENODATA}


def staged_name(path: Path) -> Path:
    """A hidden name beside ``path`` for what is to take its place; no two are the same."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{STAGED_SUFFIX}")


def dress(staged: Path, original: Path) -> tuple[str, ...]:
    """Give a new file owner, mode, extended attributes and times of the one that it replaces.

    Returns what couldn't be given.

    Raises:
        ReconstructError: the mode or the times can't be.
    """
    lost = []
    try:
        old = original.stat()
        new = staged.stat()
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            try:
                os.chown(staged, old.st_uid, old.st_gid)
            except PermissionError:
                lost.append(f"its owner is no longer {old.st_uid}:{old.st_gid}")
        for name in _attributes(original):
            try:
                os.setxattr(staged, name, os.getxattr(original, name))
            except OSError as e:
                if e.errno not in _NO_ATTRIBUTES:
                    raise
                lost.append(f"its attribute {name} is gone")
        staged.chmod(stat.S_IMODE(old.st_mode))
        os.utime(staged, ns=(old.st_atime_ns, old.st_mtime_ns))
    except OSError as e:
        raise ReconstructError(f"{original}: cannot be replaced: {e.strerror}") from e
    return tuple(lost)


def take_place(staged: Path, names: Sequence[Path]) -> None:
    """Let all ``names`` lead to the new file, one after the other, each at once.

    Raises:
        ReconstructError: some could not be replaced; the staged name is gone.
    """
    try:
        first, *others = names
        staged.replace(first)
        for name in others:
            link(first, name)
    except OSError as e:
        raise ReconstructError(f"{e.filename or names[0]}: cannot be replaced: {e.strerror}") from e
    finally:
        staged.unlink(missing_ok=True)


def link(path: Path, name: Path) -> None:
    """Let ``name`` lead to the file ``path``, whatever it led to before.

    Raises:
        OSError: it can't.
    """
    temporary = staged_name(name)
    os.link(path, temporary)
    try:
        temporary.replace(name)
    finally:
        # Renaming a link onto another one of the same file does nothing, and leaves both.
        temporary.unlink(missing_ok=True)


def put_aside(original: Path, target: Path) -> None:
    """Let ``target`` be the same file as ``original``, or else a copy with all its attributes.

    Raises:
        ReconstructError: it can't be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / ORIGINALS_MARK).touch()
        # From an earlier run: the name says what it is, and undoing checks that.
        if target.exists():
            with ByteSource(target) as kept:
                if kept.sha256() == target.name:
                    return
        target.unlink(missing_ok=True)
        try:
            os.link(original, target)
        except OSError as e:
            if e.errno not in _OTHER_FILE_SYSTEM:
                raise
            copy(original, target)
    except OSError as e:
        raise ReconstructError(f"{target}: cannot be written: {e.strerror}") from e


def copy(original: Path, target: Path) -> None:
    """A copy with owner, mode, attributes and times, under its name when it is complete.

    Raises:
        OSError, ReconstructError: it can't be made.
    """
    temporary = staged_name(target)
    try:
        with original.open("rb") as source, temporary.open("xb") as new:
            try:
                fcntl.ioctl(new.fileno(), _FICLONE, source.fileno())
            except OSError:
                shutil.copyfileobj(source, new, 1 << 20)
        dress(temporary, original)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _attributes(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        # SELinux labels follow from where a file lies; the system gives them.
        return [name for name in os.listxattr(path) if name != "security.selinux"]
    return []
