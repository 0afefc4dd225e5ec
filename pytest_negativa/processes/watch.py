"""Waits for a program: hears its silence, passes signals on, and leaves nothing of it behind."""

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

_POLL = 0.2
# Seconds between asking a process to end and making it.
_GRACE = 5.0
# Seconds in which a Ctrl-C that went to all processes of the terminal shows its effect.
_CTRL_C = 1.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Interrupted(KeyboardInterrupt):
    """This process was asked to end; no error, so that nobody takes it for one of a library.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted ({signal.Signals(number).name}): nothing is proved")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Where a signal asks this process to end, raise ``Interrupted``."""

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(number)

    with _handled_by(interrupt):
        yield


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    before: dict[int, Any] = {}
    try:
        # Elsewhere than in the main thread the program's owner sees to signals.
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, *_ENDING):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for ours, handled in before.items():
            signal.signal(ours, handled)


class Watch:
    """Waits for one program; a context in which signals wait until the program has ended.

    Ctrl-C reaches the program by itself, as all processes of a terminal; sent to this process
    alone, it is passed on.

    Attributes:
        signal: the first signal that asked this process to end.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._handled = _handled_by(self._note)

    def __enter__(self) -> Watch:
        self._handled.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handled.__exit__(*exception)

    def _note(self, number: int, _frame: object) -> None:
        # Whoever is impatient after Ctrl-C is heard, too.
        if self.signal is None or number in _ENDING:
            self.signal, self._since = number, time.monotonic()

    def wait(
        self, process: subprocess.Popen[bytes], heard_in: Path, silence_limit: float | None
    ) -> bool:
        """Wait for the end, or until there is no reason to; True if it was too long silent.

        Args:
            heard_in: a file that grows as long as the program gets on.
            silence_limit: seconds in which it must grow; None: any.
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
            if (found := _size(heard_in)) != size:
                size, silent = found, 0.0
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


def end_all(process: subprocess.Popen[bytes], mark: str) -> int:
    """End a program and all that it started and that still runs; its exit status.

    Args:
        mark: ``NAME=value``, by which their environments tell them.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _running(process, mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE
        while any(_running(process, mark)) and time.monotonic() < deadline:
            time.sleep(_POLL / 4)
    # A process that hangs in the driver outlives even SIGKILL.
    status = process.poll()
    return -signal.SIGKILL if status is None else status


def _running(process: subprocess.Popen[bytes], mark: str) -> Iterator[int]:
    if process.poll() is None:
        yield process.pid
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in (os.getpid(), process.pid):
            with contextlib.suppress(OSError):
                if os.fsencode(mark) in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent, ``parent``, is killed."""
    # Without it (no Linux, a seccomp profile) an orphan runs to its end.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
