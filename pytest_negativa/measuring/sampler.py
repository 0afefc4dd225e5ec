"""One run of a program, watched from outside."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.measuring.nvml import GpuPeaks, Gpus
from pytest_negativa.processes.tree import MemoryPeaks, descendants

# Seconds between asking a process to end and making it.
_GRACE = 5.0
# With many processes, or a slow driver, looking takes a fifth of one processor's time at most.
_TIMES_REST = 4

FIRST_RESULT_VARIABLE = "NEGATIVA_FIRST_RESULT"


class MeasureError(NegativaError):
    """What was run can't be measured, or compared."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a run; see ``RunFigures``.

    Attributes:
        status: negative for the signal that ended the program.
        outlived: processes of it that still ran when it had ended, and were ended.
    """

    status: int
    wall_s: float
    first_result_s: float | None
    root_max_rss_bytes: int | None
    memory: MemoryPeaks
    gpu: GpuPeaks
    energy_mj: int | None
    outlived: int


def first_result_library() -> Path | None:
    """The library for LD_AUDIT that notes the first result; None: it was not built."""
    path = Path(__file__).with_name("_first_result.so")
    return path if path.is_file() else None


def watch(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    output: Path,
    first_result: Path,
    cwd: Path | None = None,
    gpus: Gpus,
    interval: float,
) -> Watched:
    """Run ``command`` and watch it and all that it starts.

    This process must start nothing else meanwhile: whatever descends from it and is new counts
    as the program's. It should have adopted orphans (``adopt_orphans``), or they are missed.

    Args:
        output: where standard output and error go; its folder must exist.
        first_result: the file that ``first_result.c`` creates.
        interval: seconds between two looks, or more where looking takes long.

    Raises:
        MeasureError: the command can't be started.
    """
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = frozenset(descendants(os.getpid()))
    memory, gpu = MemoryPeaks(others), GpuPeaks(gpus)
    environ = {**environ, FIRST_RESULT_VARIABLE: str(first_result)}
    gpu.begin()
    with output.open("wb") as log:
        begin = time.monotonic_ns()
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as e:
            raise MeasureError(f"{command[0]}: cannot be started: {e.strerror}") from e
        try:
            with _Looking(memory, gpu, interval):
                # wait4 and not Popen.wait: it hands over what the kernel counted.
                _, state, usage = os.wait4(process.pid, 0)
                end = time.monotonic_ns()
        finally:
            outlived = _end_all(memory.seen, others)
    process.returncode = os.waitstatus_to_exitcode(state)
    return Watched(
        status=process.returncode,
        wall_s=(end - begin) / 1e9,
        first_result_s=_seconds_until(first_result, begin),
        # getrusage(2): in kilobytes. It starts with what this process had when it forked.
        root_max_rss_bytes=usage.ru_maxrss * 1024 if usage.ru_maxrss > floor else None,
        memory=memory,
        gpu=gpu,
        energy_mj=gpu.energy_mj(),
        outlived=outlived,
    )


class _Looking:
    """Looks at memory again and again, in a thread, as long as the body runs."""

    def __init__(self, memory: MemoryPeaks, gpu: GpuPeaks, interval: float) -> None:
        self._memory = memory
        self._gpu = gpu
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            begin = time.monotonic()
            self._memory.look()
            self._gpu.look(self._memory.pids)
            spent = time.monotonic() - begin
            if self._stop.wait(max(self._interval, _TIMES_REST * spent)):
                return


def _seconds_until(path: Path, begin: int) -> float | None:
    try:
        text = path.read_text("ascii")
    except OSError:
        return None
    # The last character says that all of it was written.
    return (int(text) - begin) / 1e9 if text.endswith("\n") else None


def _end_all(seen: Collection[int], others: Collection[int]) -> int:
    """End what still runs of the program, which would disturb the next run; how many."""

    def left() -> tuple[int, ...]:
        return tuple(pid for pid in descendants(os.getpid()) if pid not in others)

    outlived = left()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE
        while left() and time.monotonic() < deadline:
            time.sleep(0.01)
    # Orphans that ended are this process's to collect.
    for pid in {*seen, *outlived}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(outlived)
