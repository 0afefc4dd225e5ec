"""Waits for a program, detects that it hangs, passes signals on, and ends what it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from pytest_negativa.processes.tree import end_processes, marked_processes

_POLL = 0.2
# Seconds that a program has to react to a Ctrl-C that went to all processes of the terminal.
_CTRL_C = 1.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. It is no ``Exception``, so no handler swallows it.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted ({signal.Signals(number).name}): nothing is proved")


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise ``Interrupted`` if a signal asks this process to end."""

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(number)

    return _handled_by(interrupt)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    before: dict[int, Any] = {}
    try:
        # Python sets handlers in the main thread only.
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, *_ENDING):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for ours, handled in before.items():
            signal.signal(ours, handled)


class ChildWatch:
    """Waits for one program; within ``handled``, signals take effect once the program ended.

    Ctrl-C in a terminal reaches the program, too. A SIGINT for this process alone is passed on.

    Attributes:
        signal: the first signal that asked this process to end.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self.handled = _handled_by(self._note)

    def _note(self, number: int, _frame: object) -> None:
        # SIGTERM after Ctrl-C counts, too.
        if self.signal is None or number in _ENDING:
            self.signal, self._since = number, time.monotonic()

    def wait(
        self,
        process: subprocess.Popen[bytes],
        progress_file: Path,
        silence_limit: float | None,
        follow: Callable[[], object],
    ) -> bool:
        """Wait until the program ends, is silent for too long, or a signal asks to end it.

        Args:
            progress_file: a file that grows while the program gets on.
            silence_limit: seconds within which the file must grow; None: no limit.
            follow: called when the file has grown.

        Returns:
            Whether the program was silent for too long.
        """
        size, silent, last = -1, 0.0, time.monotonic()
        passed_on = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
                return False
            now = time.monotonic()
            # While this process was stopped (Ctrl-Z), so was the program.
            silent += min(now - last, 5 * _POLL)
            last = now
            if (found := _size(progress_file)) != size:
                size, silent = found, 0.0
                follow()
            if silence_limit is not None and silent > silence_limit:
                return True
            if self.signal in _ENDING:
                return False
            if self.signal == signal.SIGINT and not passed_on and now - self._since > _CTRL_C:
                passed_on = True
                if not _is_in_foreground():
                    process.send_signal(signal.SIGINT)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_in_foreground() -> bool:
    """Whether this process has a terminal whose Ctrl-C goes to it and to its children."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def end_program(process: subprocess.Popen[bytes], name: str, value: str) -> int:
    """End a program and all that it started and that still runs.

    Args:
        name: the environment variable that all of them have inherited.
        value: its value.

    Returns:
        The program's exit status.
    """

    def running() -> Iterator[psutil.Process]:
        # The caller collects the program: a zombie has no environment.
        if process.poll() is None:
            yield psutil.Process(process.pid)
        yield from (p for p in marked_processes(name, value) if p.pid != process.pid)

    end_processes(running)
    # A process that hangs in the driver outlives even SIGKILL.
    status = process.poll()
    return -signal.SIGKILL if status is None else status


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent, ``parent``, is killed."""
    # Without it (no Linux, a seccomp profile) an orphan runs to its end.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
