"""Waits for a program: hears its silence, passes signals on, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import NegativaError

_POLL = 0.2
# Seconds between asking a process to end and making it.
_GRACE = 5.0
# Seconds in which a Ctrl-C that went to all processes of the terminal shows its effect.
_CTRL_C = 1.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RoundInterrupted(NegativaError):
    """This process was asked to end.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted ({signal.Signals(number).name}): nothing is proved")


class Watch:
    """Waits for one program; a context in which this process's signals are the program's.

    Ctrl-C reaches the program by itself, as all processes of a terminal; what is sent to this
    process alone is passed on.

    Attributes:
        signal: the first signal that asked this process to end.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Watch:
        # Elsewhere than in the main thread the program's owner sees to signals.
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, *_ENDING):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: object) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        if number in _ENDING:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def wait(
        self, process: subprocess.Popen[bytes], heard_in: Path, silence_limit: float | None
    ) -> bool:
        """Wait for the end, or for no longer; True if it was too long silent.

        Args:
            heard_in: a file that grows as long as the program gets on.
            silence_limit: seconds in which it must grow; None: any.
        """
        self._process = process
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
            if self.signal in _ENDING and now - self._since > _GRACE:
                return False
            if self.signal == signal.SIGINT and not passed_on and now - self._since > _CTRL_C:
                passed_on = True
                if not _is_in_foreground():
                    self._pass_on(signal.SIGINT)


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
