"""Memory and energy of GPUs, by NVML: without a CUDA context, which would take memory itself.

nvidia-ml-py is an optional dependency. NVML API Reference Guide, "Device Queries".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


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
