"""Folders that processes of other users reach: they write their logs there, or load copies."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from pytest_negativa.errors import StoreError


def make_logs_folder(logs: Path, base: Path) -> None:
    """Make the folder, below ``base``, in which processes of any user write their logs.

    The folders from ``base`` down become passable for other users. The folders above stay as they
    are: processes of a user that can't pass them leave no log.

    Raises:
        StoreError: it can't be created.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
        logs.chmod(0o1777)
    except OSError as e:
        raise StoreError(f"{logs}: cannot be created: {e.strerror}") from e
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
            mode = stat.S_IMODE(passed.stat().st_mode)
            if mode & 0o011 != 0o011:
                passed.chmod(mode | 0o011)
