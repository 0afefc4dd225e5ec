"""Ends or fails a Python process at a change of the file system; see ``tests.support.kills``.

Python imports this module at its start, because its folder is in PYTHONPATH. Audit hooks are called
before the change is made (PEP 578).
"""

import errno
import json
import os
import sys

_PATHS = {
    "open": 1, "os.rename": 2, "os.link": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1,
    "os.symlink": 2, "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1,
    "os.setxattr": 1,
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _install(below: str, log: int, at: int, number: int) -> None:
    full = False
    deciding = False

    def is_below(path: object) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(below)  # type: ignore[arg-type]
        except TypeError:
            return False

    def change() -> None:
        nonlocal full
        os.write(log, b".")
        # Processes that share the file count together: each write appends.
        if os.lseek(log, 0, os.SEEK_CUR) == at:
            if number:
                os.kill(os.getpid(), number)
            full = True
        if full and not number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal deciding
        count = _PATHS.get(event)
        if count is None or deciding:
            return
        deciding = True
        try:
            if event == "open" and not int(str(arguments[2])) & _WRITES:
                return
            # A disk that is full can still remove files.
            if not number and event in ("os.remove", "os.rmdir"):
                return
            if any(is_below(path) for path in arguments[:count]):
                change()
        finally:
            deciding = False

    sys.addaudithook(hook)
    if number:
        return
    # These have no audit events.
    for name in ("write", "pwrite", "copy_file_range", "ftruncate", "fsync"):
        target = 1 if name == "copy_file_range" else 0
        setattr(os, name, _counted(getattr(os, name), change, is_below, target))  # type: ignore[no-untyped-call]


def _counted(real, change, is_below, target):  # type: ignore[no-untyped-def]
    def called(*arguments, **options):  # type: ignore[no-untyped-def]
        if is_below(arguments[target]):
            change()
        return real(*arguments, **options)

    return called


if _SPEC := os.environ.get("TESTS_FAULT"):
    _spec = json.loads(_SPEC)
    _install(
        _spec["below"],
        os.open(_spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666),
        _spec["at"],
        _spec["signal"],
    )
