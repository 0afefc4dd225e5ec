"""State of a file, by which a write to it shows, or another file at its path."""

from __future__ import annotations

import os

from pytest_negativa.models.base import NonNegative, Record


class FileState(Record, frozen=True, kw_only=True):
    """What changes when somebody writes to a file, as long as the system isn't restarted."""

    size: NonNegative
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state that ``os.stat`` tells."""
        return cls(
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            inode=status.st_ino,
            device=status.st_dev,
        )
