"""Writes files that get their name when they are complete.

A reader sees the old file or the new one, never half of one. The new file has no name while it is
written (``O_TMPFILE``), so that a process that is killed leaves nothing. If the file system can't
do that, it has a hidden name beside the target.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import StoreError

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written."""

# A kernel or file system without O_TMPFILE opens the folder itself, which is an error.
_CANNOT_TMPFILE = {errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT}


class NewFile:
    """A file that is being written; see ``new_file``.

    Attributes:
        fd: its descriptor, for reading and writing.
    """

    def __init__(self, target: Path, flag: int) -> None:
        self._target = target
        self._name: Path | None = None
        try:
            self.fd = os.open(target.parent, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            if e.errno not in _CANNOT_TMPFILE:
                raise
            self.fd, name = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY_SUFFIX
            )
            self._name = Path(name)

    def path(self) -> Path:
        """A hidden name beside the target by which other programs can open the file.

        Raises:
            OSError: it can't be made.
        """
        if self._name is None:
            # linkat(2) gives a name, but does not replace; its manual page tells this way in.
            random = os.urandom(6).hex()
            name = self._target.with_name(f".{self._target.name}.{random}{TEMPORARY_SUFFIX}")
            # With a folder given Python calls linkat, and that follows the link.
            os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=self.fd, follow_symlinks=True)
            self._name = name
        return self._name

    def publish(self) -> None:
        """Give the file its name, and replace what had it.

        Raises:
            OSError: it can't be renamed.
        """
        self.path().replace(self._target)
        self._name = None

    def close(self) -> None:
        """Close the file; without ``publish`` nothing is left of it."""
        os.close(self.fd)
        if self._name is not None:
            with contextlib.suppress(OSError):
                self._name.unlink()


@contextlib.contextmanager
def new_file(target: Path, *, flag: int = os.O_TMPFILE) -> Iterator[NewFile]:
    """A file that replaces ``target`` when it is published, and is gone if it is not.

    Args:
        target: its folder must exist.
        flag: how to open a file without a name; tests give another one.

    Raises:
        OSError: it can't be made.
    """
    new = NewFile(target, flag)
    try:
        yield new
    finally:
        # Also when interrupted.
        new.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whose folder is made if it is not there.

    A file that is replaced hands down its mode and its owner.

    Raises:
        StoreError: it can't be written; ``path`` is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as new:
            with os.fdopen(os.dup(new.fd), "wb") as file:
                file.write(data)
            _give_attributes(new.fd, path)
            new.publish()
    except OSError as e:
        raise StoreError(f"{path}: cannot be written: {e.strerror}") from e


def remove_abandoned(target: Path) -> None:
    """Remove what writers of ``target`` left that were killed. None may be at work."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent):
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(TEMPORARY_SUFFIX):
                Path(entry.path).unlink()


def _give_attributes(handle: int, path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        # A new file is the owner's alone; give what a plain open() would.
        os.fchmod(handle, 0o666 & ~_umask())
        return
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(handle, status.st_uid, status.st_gid)
    os.fchmod(handle, stat.S_IMODE(status.st_mode))


def _umask() -> int:
    # The only portable way to read it is to set it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
