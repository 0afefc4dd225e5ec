"""A new file takes the place of an old one, under all its names; and originals are kept.

No file is ever written to: names are given to another file, so a process that has the old file
mapped keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.edits import Edits
from pytest_negativa.rewriting.layout import FileLayout, write_layout
from pytest_negativa.slimming.tree import ORIGINALS_MARK, STAGED_SUFFIX
from pytest_negativa.storage.atomic import new_file

_OTHER_FILE_SYSTEM = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}
_NO_ATTRIBUTES = {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENODATA}


def staged_name(path: Path) -> Path:
    """A hidden name beside ``path`` for the file that is to take its place; each is different."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{STAGED_SUFFIX}")


def copy_metadata(original: Path, new: Path | int) -> tuple[str, ...]:
    """Give a new file the owner, mode, extended attributes and times of the original.

    Args:
        original: whose they are.
        new: the file, or its descriptor.

    Returns:
        A sentence for each that could not be given.

    Raises:
        ReconstructError: the mode or the times can't be given.
    """
    lost = []
    try:
        old = original.stat()
        status = os.stat(new)  # noqa: PTH116 (may be a descriptor, as below)
        if (old.st_uid, old.st_gid) != (status.st_uid, status.st_gid):
            try:
                os.chown(new, old.st_uid, old.st_gid)
            except PermissionError:
                lost.append(f"its owner is no longer {old.st_uid}:{old.st_gid}")
        for name in _attributes(original):
            try:
                os.setxattr(new, name, os.getxattr(original, name))
            except OSError as e:
                if e.errno not in _NO_ATTRIBUTES:
                    raise
                lost.append(f"its attribute {name} is gone")
        os.chmod(new, stat.S_IMODE(old.st_mode))  # noqa: PTH101
        os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    except OSError as e:
        raise ReconstructError(f"{original}: cannot be replaced: {e.strerror}") from e
    return tuple(lost)


def replace_all(staged: Path, names: Sequence[Path]) -> None:
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


def keep_original(original: Path, target: Path) -> None:
    """Let ``target`` be the same file as ``original``, or else a copy with all its attributes.

    Args:
        original: the library.
        target: named by the SHA-256 of the original, in hex.

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
            copy_file(original, target)
    except OSError as e:
        raise ReconstructError(f"{target}: cannot be written: {e.strerror}") from e


def copy_file(original: Path, target: Path) -> None:
    """Copy a file with its owner, mode, attributes and times; it gets its name when complete.

    Raises:
        OSError: it can't be written.
        NegativaError: it can't be read, or the attributes can't be given.
    """
    with ByteSource(original) as source, new_file(target) as new:
        write_layout(FileLayout.of_copy(Edits(source.size)), source, new.fd)
        copy_metadata(original, new.fd)
        new.publish()


def _attributes(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        # SELinux labels follow from where a file lies; the system gives them.
        return [name for name in os.listxattr(path) if name != "security.selinux"]
    return []
