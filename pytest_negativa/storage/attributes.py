"""Owner, mode, extended attributes and times of files.

By descriptors alone: somebody who can write to a folder may put a link or another file into the
place of a name, and a call by that name would change what is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

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
