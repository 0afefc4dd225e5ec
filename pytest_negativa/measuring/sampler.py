"""One run of a program, sampled: time to first result, memory, GPU memory, energy (NVML).

NVML shows the latter two without a CUDA context, which would take memory itself. nvidia-ml-py is an
optional dependency. NVML API Reference Guide, "Device Queries".
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from pytest_negativa.errors import NegativaError, refusing
from pytest_negativa.models.measurement import RunFigures
from pytest_negativa.processes.programs import MemoryPeaks, descendants, end_processes


class Gpus:
    """All GPUs that NVML shows.

    Attributes:
        names: the devices' names; empty if there is no device or NVML does not work.
        missing: why NVML does not work; None if it does.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.missing: str | None = None
        self._devices: tuple[Any, ...] = ()
        try:
            import pynvml
        except ImportError:
            self.missing = (
                "GPU memory and energy are not measured: nvidia-ml-py is not installed "
                "(pip install 'pytest-negativa[measure]')"
            )
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            devices = tuple(map(pynvml.nvmlDeviceGetHandleByIndex, range(count)))
            self.names = tuple(str(pynvml.nvmlDeviceGetName(device)) for device in devices)
            self._devices = devices
        except pynvml.NVMLError as e:
            self.missing = f"GPU memory and energy are not measured: NVML: {e}"

    def used_bytes(self) -> int | None:
        """Bytes in use on all devices, by any process."""
        return self._sum(lambda d: self._nvml.nvmlDeviceGetMemoryInfo(d).used)

    def energy_mj(self) -> int | None:
        """Millijoules that all devices took since their driver was loaded."""
        return self._sum(lambda d: self._nvml.nvmlDeviceGetTotalEnergyConsumption(d))

    def used_by(self, pids: Collection[int]) -> int | None:
        """Bytes that these processes use; None if NVML shows none of them.

        In a container with its own process ids, NVML shows those outside of it, or nothing.
        """
        found: int | None = None
        for device in self._devices:
            try:
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
            except self._nvml.NVMLError:
                return None
            for process in processes:
                if process.pid in pids and process.usedGpuMemory is not None:
                    found = (found or 0) + int(process.usedGpuMemory)
        return found

    def _sum(self, of: Callable[[Any], int]) -> int | None:
        if not self._devices:
            return None
        try:
            return sum(int(of(device)) for device in self._devices)
        except self._nvml.NVMLError:
            return None


class GpuPeaks:
    """The highest sampled GPU memory of a process tree in bytes, and its energy, from now on."""

    def __init__(self, gpus: Gpus) -> None:
        self.of_processes: int | None = None
        self.on_devices: int | None = None
        self._gpus = gpus
        self._used_before = gpus.used_bytes()
        self._energy_before = gpus.energy_mj()

    def sample(self, pids: Collection[int]) -> None:
        if (used := self._gpus.used_by(pids)) is not None:
            self.of_processes = max(self.of_processes or 0, used)
        used = self._gpus.used_bytes()
        if used is not None and self._used_before is not None:
            self.on_devices = max(self.on_devices or 0, used - self._used_before, 0)

    def energy_mj(self) -> int | None:
        """Millijoules since then; None if NVML does not tell."""
        now = self._gpus.energy_mj()
        if now is None or self._energy_before is None:
            return None
        return now - self._energy_before


# Sampling takes at most a fifth of one processor's time, however many processes there are.
_TIMES_REST = 4

FIRST_RESULT_VARIABLE = "NEGATIVA_FIRST_RESULT"
FIRST_RESULT = Path(__file__).with_name("_first_result.so")
"""For LD_AUDIT: notes the first result. It is built with the library that redirects."""


class MeasureError(NegativaError):
    """The program can't be measured, or its runs can't be compared."""


def run_sampled(
    run: RunFigures,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    output: Path,
    first_result: Path,
    gpus: Gpus,
    interval: float = 0.02,
) -> RunFigures:
    """Run ``command`` and sample it and all processes that it starts; returns ``run`` with figures.

    This process must start nothing else meanwhile: every new descendant counts as the program's.
    It should have adopted orphans (``adopt_orphans``), or they are missed.

    Args:
        output: the file for standard output and error; its folder must exist.
        first_result: the file that ``first_result.c`` creates.
        interval: seconds between two samples, or more if sampling takes long.

    Raises:
        MeasureError: the command can't be started.
    """
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory, gpu = MemoryPeaks(frozenset(descendants())), GpuPeaks(gpus)
    environ = {**environ, FIRST_RESULT_VARIABLE: str(first_result)}
    with output.open("wb") as log:
        begin = time.monotonic_ns()
        with refusing(command[0], "started", MeasureError):
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            with _sampling(memory, gpu, interval):
                # wait4 and not Popen.wait: it returns what the kernel counted.
                _, state, usage = os.wait4(process.pid, 0)
                end = time.monotonic_ns()
        finally:
            outlived = _end_outlived(memory)
    process.returncode = os.waitstatus_to_exitcode(state)
    # getrusage(2): in kilobytes. It starts with what this process had when it forked.
    root = usage.ru_maxrss * 1024 if usage.ru_maxrss > floor else None
    return replace(
        run,
        status=process.returncode,
        wall_s=round((end - begin) / 1e9, 6),
        first_result_s=_seconds_until(first_result, begin),
        # The kernel's figure for one process can't exceed that of all processes.
        peak_rss_bytes=max(memory.rss, root or 0) or None,
        peak_pss_bytes=memory.pss,
        root_max_rss_bytes=root,
        gpu_process_bytes=gpu.of_processes,
        gpu_device_bytes=gpu.on_devices,
        energy_mj=gpu.energy_mj(),
        processes=len(memory.seen),
        outlived=outlived,
    )


@contextlib.contextmanager
def _sampling(memory: MemoryPeaks, gpu: GpuPeaks, interval: float) -> Iterator[None]:
    """Sample memory in a thread while the body of the ``with`` statement runs."""
    is_over = threading.Event()

    def sample() -> None:
        while True:
            begin = time.monotonic()
            memory.sample()
            gpu.sample({process.pid for process in memory.running})
            spent = time.monotonic() - begin
            if is_over.wait(max(interval, _TIMES_REST * spent)):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _seconds_until(path: Path, begin: int) -> float | None:
    try:
        text = path.read_text("ascii")
    except OSError:
        return None
    # The last character says that all of it was written.
    return (int(text) - begin) / 1e9 if text.endswith("\n") else None


def _end_outlived(memory: MemoryPeaks) -> int:
    """End what still runs of the program, which would disturb the next run; how many."""

    def left() -> tuple[psutil.Process, ...]:
        return tuple(process for process in descendants() if process not in memory.others)

    outlived = left()
    end_processes(left)
    # Orphans that ended are this process's to collect.
    for pid in {*memory.seen, *(process.pid for process in outlived)}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(outlived)
