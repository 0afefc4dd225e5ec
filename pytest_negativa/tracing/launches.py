"""How often which kernel was launched, from CUPTI's activity records; off by default."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

# CUpti_ActivityKind in cupti_activity.h: CONCURRENT_KERNEL doesn't serialise kernels.
_KIND_CONCURRENT_KERNEL = 10
_BUFFER_SIZE = 4 << 20
_FLUSH_FORCED = 1
_RTLD_NOLOAD = 4


class KernelLaunches(NamedTuple):
    """Launches of a kernel; see ``models.trace.Launches``."""

    name: str
    ranges: tuple[str, ...]
    launches: int
    gpu_ns: int


class LaunchCounter:
    """Counts launches by kernel name between two calls of ``take``."""

    def __init__(self) -> None:
        self._cupti: Any = None
        # Count and nanoseconds by name.
        self._counts: dict[str, tuple[int, int]] = {}
        # CUPTI hands buffers over in a thread of its own.
        self._lock = threading.Lock()

    def start(self, cupti: Any) -> None:
        self._cupti = cupti
        cupti.activity_register_callbacks(self._give_buffer, self._take_buffer)
        cupti.activity_enable(_KIND_CONCURRENT_KERNEL)

    @staticmethod
    def _give_buffer() -> tuple[int, int]:
        return _BUFFER_SIZE, 0

    def _take_buffer(self, activities: Iterable[Any]) -> None:
        # Both times are 0 if CUPTI could not tell them (CUpti_ActivityKernel in cupti_activity.h).
        launches = [
            (activity.name, activity.end - activity.start)
            for activity in activities
            if activity.kind == _KIND_CONCURRENT_KERNEL
        ]
        with self._lock:
            counts = self._counts
            for name, took in launches:
                count, gpu_ns = counts.get(name, (0, 0))
                counts[name] = (count + 1, gpu_ns + took)

    def take(self) -> tuple[KernelLaunches, ...]:
        """What was launched since the last time, by name.

        Waits for the device: what a test launched may still run when the test is over.
        """
        if self._cupti is None:
            return ()
        try:
            ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD).cuCtxSynchronize()
        except OSError:
            return ()  # no driver in the process, no launches
        self._cupti.activity_flush_all(_FLUSH_FORCED)
        with self._lock:
            counts, self._counts = self._counts, {}
        return tuple(
            KernelLaunches(name, (), count, gpu_ns)
            for name, (count, gpu_ns) in sorted(counts.items())
        )

    def stop(self) -> None:
        if self._cupti is not None:
            self._cupti.activity_disable(_KIND_CONCURRENT_KERNEL)
            self._cupti = None
