"""Failed children (``subprocess``, ``asyncio``) of a test: their exit status, which signals.

A test may ignore the exit status of a child, and nothing else tells that a child without the GPU
failed.
"""

from __future__ import annotations

import os
import signal
import subprocess

from pytest_negativa.storage.records import utf8

# Somebody else ended a child by another signal, sooner or later.
_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
)


class ChildEnds:
    """Notes children that failed: ``Popen`` sets its attribute ``returncode`` when one ends."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._attribute = property(lambda process: process.__dict__.get("returncode"), self._note)

    def start(self) -> None:
        """Note them from now on."""
        setattr(subprocess.Popen, "returncode", self._attribute)  # noqa: B010 (a new one)

    def stop(self) -> None:
        """Note no more of them, unless a session within this one did so already."""
        if vars(subprocess.Popen).get("returncode") is self._attribute:
            delattr(subprocess.Popen, "returncode")

    def _note(self, process: subprocess.Popen[bytes], status: int | None) -> None:
        process.__dict__["returncode"] = status
        if status is not None and (status > 0 or -status in _CRASHES):
            self._failed.add(f"{_program(process.args)} ended with {status}")

    def take(self) -> list[str]:
        """Those since the last call: program and status."""
        failed, self._failed = self._failed, set()
        return sorted(failed)


def _program(command: object) -> str:
    first = command[0] if isinstance(command, list | tuple) else command
    text = os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""
    return utf8(os.path.basename(text.partition(" ")[0]))  # noqa: PTH119
