"""Files written whole: hidden name, rename, disk; owner, mode and attributes that are copied.

A reader sees the old file or the new one, never half of one. The new file has a hidden name beside
the target while it is written. A process that is killed leaves it, and ``remove_abandoned``, or the
next run of ``slim``, removes it.

Owner, mode, extended attributes and times go from a file to the next by descriptors alone: somebody
who can write to a folder may put a link or another file into the place of a name, and a call by
that name would change what is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.storage.shared_folders import refuse_shared

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written."""


class NewFile:
    """A file that replaces ``target`` when it is published, and is gone if it is not.

    Args:
        target: its folder must exist.
        hidden: its name meanwhile, in the same folder; by default a random one.
        mode: its permissions, less those that the umask forbids.

    Attributes:
        fd: its descriptor, for reading and writing.
        path: the hidden name, by which other programs can open the file.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, target: Path, *, hidden: Path | None = None, mode: int = 0o600) -> None:
        random = f".{target.name}.{os.urandom(6).hex()}{TEMPORARY_SUFFIX}"
        self.path = hidden or target.with_name(random)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self.fd = os.open(self.path, flags, mode)
        self._target = target
        self._is_published = False

    def __enter__(self) -> NewFile:
        return self

    def publish(self, *, durable: bool = False, replace: bool = True) -> None:
        """Give the file its name, and replace what had it.

        Args:
            durable: force the file and its name to disk, in this order, for a power cut.
            replace: whether it may replace a file; otherwise that is an error.

        Raises:
            OSError: it can't be renamed.
        """
        if durable:
            os.fsync(self.fd)
        if not replace:
            # This takes the name, also on file systems without hard links.
            self._target.touch(exist_ok=False)
        self.path.replace(self._target)
        self._is_published = True
        if durable:
            sync_folder(self._target.parent)

    def __exit__(self, *exception: object) -> None:
        os.close(self.fd)
        if not self._is_published:
            with contextlib.suppress(OSError):
                self.path.unlink()


def write_atomically(
    path: Path,
    data: bytes,
    *,
    hidden: Path | None = None,
    durable: bool = False,
    mode: int | None = None,
) -> None:
    """Write ``data`` to ``path``, whose folder is made if it is not there.

    A file that is replaced hands down its mode and its owner.

    Args:
        path: the file.
        data: its new content.
        hidden: see ``NewFile``.
        durable: force it to disk.
        mode: of the file, as ``chmod`` takes it, instead of the one that is handed down.

    Raises:
        StoreError: it can't be written; ``path`` is as it was.
    """
    with refusing(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.exists() else None
        # The umask allows what a plain open() would; nobody else may read what nobody else could.
        made = 0o666 if before is None else 0o600
        with NewFile(path, hidden=hidden, mode=made) as new:
            with os.fdopen(os.dup(new.fd), "wb") as file:
                file.write(data)
            if before is not None:
                _hand_down(new.fd, before)
            if mode is not None:
                os.fchmod(new.fd, mode)
            new.publish(durable=durable)


def remove_file(path: Path) -> None:
    """Remove a file of our own, if it is there.

    Raises:
        StoreError: it can't be removed.
    """
    with refusing(path, "removed"):
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Force the bytes of a file to disk.

    Raises:
        OSError: it can't be opened or written.
    """
    _sync(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk, on file systems that can.

    Raises:
        OSError: it can't be opened.
    """
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as e:
        # What fsync(2) says of files that don't support it.
        if e.errno not in (errno.EINVAL, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def remove_abandoned(target: Path) -> None:
    """Remove what writers of ``target`` left that were killed. None may be at work.

    Where another user can exchange the folder, root removes nothing.
    """
    with contextlib.suppress(OSError, ReconstructError):
        refuse_shared(target.parent)
        for entry in os.scandir(target.parent):
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(TEMPORARY_SUFFIX):
                Path(entry.path).unlink()


def _hand_down(descriptor: int, status: os.stat_result) -> None:
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


_NO_ATTRIBUTES = {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENODATA}
# SELinux labels follow from where a file lies; the system gives them.
_NEVER_COPIED = {"security.selinux"}
# The kernel's measurements of a file's bytes and of its attributes: a signature that doesn't fit
# the new bytes makes the file unreadable where IMA appraises.
_OF_THE_BYTES = {"security.ima", "security.evm"}


def copy_metadata(original: int, new: int, *, same_bytes: bool = False) -> tuple[str, ...]:
    """Give a new file the owner, mode, extended attributes and times of the original.

    Args:
        original, new: descriptors.
        same_bytes: the content is the same, so attributes that vouch for it are copied, too.

    Returns:
        A sentence for each that could not be given.

    Raises:
        OSError: the mode or the times can't be given.
    """
    lost = []
    old, status = os.fstat(original), os.fstat(new)
    if (old.st_uid, old.st_gid) != (status.st_uid, status.st_gid):
        try:
            os.fchown(new, old.st_uid, old.st_gid)
        except PermissionError:
            lost.append(f"its owner is no longer {old.st_uid}:{old.st_gid}")
    for name in _attributes(original):
        if name in _OF_THE_BYTES and not same_bytes:
            lost.append(f"its attribute {name} is gone, because it vouches for the old bytes")
            continue
        try:
            os.setxattr(new, name, os.getxattr(original, name))
        except OSError as e:
            if e.errno not in _NO_ATTRIBUTES:
                raise
            lost.append(f"its attribute {name} is gone")
    os.fchmod(new, stat.S_IMODE(old.st_mode))
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    return tuple(lost)


def set_mtime(descriptor: int, mtime_ns: int) -> None:
    """Give a file the modification time ``mtime_ns``, in ns since the epoch.

    Raises:
        OSError: it can't be given.
    """
    os.utime(descriptor, ns=(os.fstat(descriptor).st_atime_ns, mtime_ns))


def _attributes(descriptor: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listxattr(descriptor) if name not in _NEVER_COPIED]
    return []
