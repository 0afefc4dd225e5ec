"""The processes that a program starts: which run, how much memory they take, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import psutil

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# Sampling must not slow down the program: reading a large process's page tables takes long and
# holds a lock that the process may want itself, and there may be thousands of processes.
_SHARE_OF_TIME = 0.05
# Seconds between SIGTERM and SIGKILL.
_GRACE = 5.0
_POLL = 0.05


def adopt_orphans() -> bool:
    """Make this process the parent of descendants whose own parent ends.

    prctl(2), PR_SET_CHILD_SUBREAPER. Returns False if the system does not support it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


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


def resident_bytes(process: psutil.Process) -> int:
    """The resident set of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def proportional_bytes(process: psutil.Process) -> int | None:
    """The proportional set of a process; None if it has ended or may not be read."""
    try:
        return int(process.memory_full_info().pss)
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
        rss = sum(map(resident_bytes, self.running))
        self.rss = max(self.rss, rss)
        begin = time.monotonic()
        if rss <= self._pss_at_rss or begin < self._next_pss:
            return
        self._pss_at_rss = rss
        known = [pss for p in self.running if (pss := proportional_bytes(p)) is not None]
        self._next_pss = _next_time(begin)
        if known:
            self.pss = max(self.pss or 0, sum(known))


def _next_time(begin: float) -> float:
    """When to repeat work that began at ``begin`` and ends now."""
    end = time.monotonic()
    return end + (end - begin) / _SHARE_OF_TIME
