"""Programs and their processes: signals, Ctrl-C, orphans, SIGKILL after 5 s, memory, hangs.

``ChildWatch`` waits for a program, detects that it hangs, and passes signals on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_negativa.errors import Stopped

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# Sampling must not slow down the program: reading a large process's page tables takes long and
# holds a lock that the process may want itself, and there may be thousands of processes.
_SHARE_OF_TIME = 0.05
# Seconds between SIGTERM and SIGKILL.
_GRACE = 5.0
_POLL = 0.05
_WATCH_POLL = 0.2
# Seconds that a program has to react to a Ctrl-C that went to all processes of the terminal.
_CTRL_C = 1.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends.

    prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> tuple[psutil.Process, ...]:
    """The running processes that this one started, directly or not."""
    return tuple(filter(_is_running, psutil.Process().children(recursive=True)))


def marked_processes(name: str, value: str) -> Iterator[psutil.Process]:
    """The running processes whose environment has the variable ``name`` with this value.

    They may have been started in another session, or have lost their parent.
    """
    own = psutil.Process()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process != own and process.environ().get(name) == value:
                yield process


def end_processes(running: Callable[[], Iterable[psutil.Process]]) -> None:
    """End the processes that ``running`` returns: SIGTERM, and SIGKILL after 5 seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        deadline = time.monotonic() + _GRACE
        while any(running()) and time.monotonic() < deadline:
            time.sleep(_POLL)


def memory_of(process: psutil.Process, *, proportional: bool = False) -> int | None:
    """The resident or the proportional set of a process; None if it has ended or may not be read.

    Bytes.
    """
    try:
        info: Any = process.memory_full_info() if proportional else process.memory_info()
        return int(info.pss if proportional else info.rss)
    except psutil.Error:
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@dataclass(slots=True)
class MemoryPeaks:
    """The highest sampled memory of the processes that this one started.

    Attributes:
        others: processes that ran before, which don't count.
        rss: bytes, summed over all processes.
        pss: bytes, summed over all processes; None if no process may be read.
        running: the processes of the last sample.
        seen: ids of the processes of all samples.
    """

    others: Collection[psutil.Process]
    rss: int = 0
    pss: int | None = None
    running: tuple[psutil.Process, ...] = ()
    seen: set[int] = field(default_factory=set)
    _pss_at_rss: int = 0
    _next_pss: float = 0.0
    _next_scan: float = 0.0

    def sample(self) -> None:
        begin = time.monotonic()
        if begin >= self._next_scan:
            self.running = tuple(p for p in descendants() if p not in self.others)
            self.seen.update(p.pid for p in self.running)
            self._next_scan = _next_time(begin)
        rss = sum(memory_of(process) or 0 for process in self.running)
        self.rss = max(self.rss, rss)
        begin = time.monotonic()
        if rss <= self._pss_at_rss or begin < self._next_pss:
            return
        self._pss_at_rss = rss
        known = [s for p in self.running if (s := memory_of(p, proportional=True)) is not None]
        self._next_pss = _next_time(begin)
        if known:
            self.pss = max(self.pss or 0, sum(known))


def _next_time(begin: float) -> float:
    """When to repeat work that began at ``begin`` and ends now."""
    end = time.monotonic()
    return end + (end - begin) / _SHARE_OF_TIME


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise ``Stopped`` if a signal asks this process to end."""

    def interrupt(number: int, _frame: object) -> None:
        raise Stopped(number)

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
                process.wait(_WATCH_POLL)
                return False
            now = time.monotonic()
            # While this process was stopped (Ctrl-Z), so was the program.
            silent += min(now - last, 5 * _WATCH_POLL)
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
