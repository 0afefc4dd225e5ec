"""Failed children of a test (``subprocess``, ``asyncio``, ``os.system``): exit status, signals.

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
        self._system = os.system
        self._attribute = property(lambda process: process.__dict__.get("returncode"), self._note)

    def start(self) -> None:
        """Note them from now on."""
        setattr(subprocess.Popen, "returncode", self._attribute)  # noqa: B010 (a new one)
        os.system = self._run

    def stop(self) -> None:
        """Note no more of them, unless a session within this one did so already."""
        if vars(subprocess.Popen).get("returncode") is self._attribute:
            delattr(subprocess.Popen, "returncode")
        if os.system == self._run:
            os.system = self._system

    def _run(self, command: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> int:
        status = self._system(command)
        # -1: who ignores SIGCHLD can't wait for it.
        self._add(command, 0 if status < 0 else os.waitstatus_to_exitcode(status))
        return status

    def _note(self, process: subprocess.Popen[bytes], status: int | None) -> None:
        process.__dict__["returncode"] = status
        if status is not None:
            self._add(process.args, status)

    def _add(self, command: object, status: int) -> None:
        if status > 0 or -status in _CRASHES:
            self._failed.add(f"{_program(command)} ended with {status}")

    def take(self) -> list[str]:
        """Those since the last call: program and status."""
        failed, self._failed = self._failed, set()
        return sorted(failed)


def _program(command: object) -> str:
    first = command[0] if isinstance(command, list | tuple) else command
    text = os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""
    return utf8(os.path.basename(text.partition(" ")[0]))  # noqa: PTH119
