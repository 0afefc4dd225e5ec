"""A process with all that it starts: which processes there are, and their memory. From /proc."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# Looking must not slow down what is looked at: reading a large process's page tables takes long
# and holds a lock that it may want itself, and there may be thousands of processes.
_SHARE_OF_TIME = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


def adopt_orphans() -> bool:
    """Have processes whose parent ends become children of this one, so that none gets lost.

    prctl(2), PR_SET_CHILD_SUBREAPER. False where the system doesn't have it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def descendants(root: int) -> tuple[int, ...]:
    """The processes that ``root`` started, directly or not, and that still run."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (parent := _parent(int(entry.name))) is not None:
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return tuple(found)


def _parent(pid: int) -> int | None:
    """None for what has ended, too: a zombie has no memory."""
    # The name, in parentheses, may hold anything; state and parent come behind it. proc(5).
    _, _, rest = _read(pid, "stat").rpartition(b")")
    fields = rest.split()
    return int(fields[1]) if len(fields) > 1 and fields[0] not in (b"Z", b"X") else None


def resident_bytes(pid: int) -> int:
    """The resident set of a process; 0 if there is no such process."""
    fields = _read(pid, "statm").split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def proportional_bytes(pid: int) -> int | None:
    """The proportional set of a process; None if it may not be read, or can't be any more."""
    found = _PSS.search(_read(pid, "smaps_rollup"))
    return int(found[1]) * 1024 if found else None


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 (half the time)
            return file.read()
    except OSError:
        return b""


@dataclass(slots=True)
class MemoryPeaks:
    """The highest memory of the processes that this one started, as far as it was looked at.

    Attributes:
        others: processes that were there before, and don't count.
        pids: those that were there at the last look.
        seen: all that ever were.
    """

    others: Collection[int]
    rss: int = 0
    pss: int | None = None
    pids: tuple[int, ...] = ()
    seen: set[int] = field(default_factory=set)
    _pss_at_rss: int = 0
    _next_pss: float = 0.0
    _next_scan: float = 0.0

    def look(self) -> None:
        begin = time.monotonic()
        if begin >= self._next_scan:
            self.pids = tuple(p for p in descendants(os.getpid()) if p not in self.others)
            self.seen.update(self.pids)
            self._next_scan = _rest(begin)
        rss = sum(map(resident_bytes, self.pids))
        self.rss = max(self.rss, rss)
        begin = time.monotonic()
        if rss <= self._pss_at_rss or begin < self._next_pss:
            return
        self._pss_at_rss = rss
        known = tuple(_known(self.pids))
        self._next_pss = _rest(begin)
        if known:
            self.pss = max(self.pss or 0, sum(known))


def _rest(begin: float) -> float:
    """When what took from ``begin`` to now may be done again."""
    end = time.monotonic()
    return end + (end - begin) / _SHARE_OF_TIME


def _known(pids: tuple[int, ...]) -> Iterator[int]:
    for pid in pids:
        if (pss := proportional_bytes(pid)) is not None:
            yield pss
