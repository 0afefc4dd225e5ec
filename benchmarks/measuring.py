"""What the benchmarks share: running commands, and what they cost with all their children."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped,import-not-found,unused-ignore]

_SAMPLE_S = 0.02


@dataclass(frozen=True)
class Cost:
    """``cpu_s`` is user and system time; RSS in bytes.

    ``sum_rss`` is the peak over time of the sum over all processes, in which pages that they
    share count more than once; ``max_rss`` is the peak of the largest process.
    """

    wall_s: float
    cpu_s: float
    sum_rss: int
    max_rss: int

    def __str__(self) -> str:
        return (
            f"{self.wall_s:7.2f} s wall, {self.cpu_s:7.2f} s CPU, peak RSS "
            f"{self.sum_rss / 1e6:,.0f} MB over all processes, {self.max_rss / 1e6:,.0f} MB in one"
        )


def run(
    command: Sequence[str | os.PathLike[str]],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Cost:
    """Run a command to its end; its output is dropped.

    CPU times of processes whose parent is another one (a fork server's children) are in no
    parent's account, so each is sampled while it lives.
    """
    start = time.perf_counter()
    process = psutil.Popen(
        [os.fspath(part) for part in command],
        cwd=cwd,
        env=None if environment is None else {**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    sampler = _Sampler(process)
    sampler.start()
    _, error = process.communicate()
    wall = time.perf_counter() - start
    sampler.stop()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {error.decode()}")
    return Cost(wall, sampler.cpu_s, sampler.sum_rss, sampler.max_rss)


class _Sampler(threading.Thread):
    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._done = threading.Event()
        self._cpu: dict[int, float] = {}
        self.sum_rss = 0
        self.max_rss = 0

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            sizes = []
            try:
                family = [self._process, *self._process.children(recursive=True)]
            except psutil.Error:
                continue
            for one in family:
                try:
                    times = one.cpu_times()
                    self._cpu[one.pid] = times.user + times.system
                    sizes.append(one.memory_info().rss)
                except psutil.Error:
                    continue
            self.sum_rss = max(self.sum_rss, sum(sizes))
            self.max_rss = max(self.max_rss, *sizes, 0)

    def stop(self) -> None:
        self._done.set()
        self.join()


def measure(task: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    task()
    return time.perf_counter() - wall, time.process_time() - cpu


def warm_up(paths: Sequence[Path]) -> None:
    """Read files once, so that no contender pays for the disk."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def print_load() -> None:
    """What else the machine does: figures taken under load compare only with each other."""
    one, five, _ = os.getloadavg()
    print(f"load average {one:.1f} (1 min), {five:.1f} (5 min), {os.cpu_count()} processors")
