"""Records in a file, one line of JSON each: appends them, and reads the lines."""

from __future__ import annotations

import contextlib
import os
import weakref
from functools import partial
from pathlib import Path

import msgspec

from pytest_negativa.errors import refusing
from pytest_negativa.storage.system import System


class LineWriter:
    """Appends records to a new file, each a line of JSON in a single ``write``.

    ``O_APPEND`` and one write a line: threads don't mix lines, and what was written is in
    the kernel's hands, so that SIGKILL takes nothing back. No lock: a callback may come while
    another one of the same thread runs (garbage collection may unload a module).

    Raises:
        StoreError: the file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        with refusing(path, "created"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = System.open(
                str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        self._file = self._identify()
        self._write = partial(System.write, self._fd)
        self._encode = msgspec.json.Encoder().encode
        # A forked child inherits the handle; what it does is not this process's doing.
        this = weakref.ref(self)

        def forked() -> None:
            writer = this()
            if writer is not None:
                writer.abandon()

        os.register_at_fork(after_in_child=forked)

    def write(self, record: msgspec.Struct) -> None:
        """Append a record. Never raises, for callers are callbacks: see ``failure``."""
        try:
            line = self._encode(record) + b"\n"
        except UnicodeEncodeError as e:
            # JSON can't hold a path that is not UTF-8.
            self.fail(f"{self.path}: cannot be written: {e.object!a} is not UTF-8")
            return
        if self._fd >= 0 and not self.is_open():
            self.fail(f"{self.path}: cannot be written: the tests closed its descriptor")
            return
        try:
            written = self._write(line)
        except OSError as e:
            # EBADF: this is a forked child, or the file is closed.
            if self._fd >= 0:
                self.fail(f"{self.path}: cannot be written: {e.strerror}")
            return
        if written != len(line):
            self.fail(f"{self.path}: cannot be written: no space for a whole line")

    def fail(self, problem: str) -> None:
        """Write nothing more: what follows a lost line would count as all there is."""
        self.failure = problem
        self.abandon()

    def is_open(self) -> bool:
        """Whether the descriptor is still that of the file.

        A test may close all descriptors, and its next file gets the number.
        """
        return self._identify() == self._file

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = System.fstat(self._fd)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def abandon(self) -> None:
        """Close this process's handle; in a forked child, which must not write here."""
        if self._fd >= 0 and self.is_open():
            with contextlib.suppress(OSError):
                System.close(self._fd)
        # Whatever still comes fails with EBADF instead of landing in another file.
        self._fd = -1
        self._write = partial(System.write, -1)

    close = abandon


def is_torn(line: bytes) -> bool:
    """Whether a line has no end: its process was killed in its write, and what it said is lost."""
    return not line.endswith(b"\n")
