"""How often which kernel was launched, from CUPTI's activity records; off by default."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

# CUpti_ActivityKind in cupti_activity.h: CONCURRENT_KERNEL doesn't serialise kernels.
_KIND_CONCURRENT_KERNEL = 10
_BUFFER_SIZE = 4 << 20
_FLUSH_FORCED = 1
_RTLD_NOLOAD = 4


class LaunchCounter:
    """Counts launches by kernel name between two calls of ``take``."""

    def __init__(self) -> None:
        self._cupti: Any = None
        self._counts: Counter[str] = Counter()
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
        names = [
            activity.name for activity in activities if activity.kind == _KIND_CONCURRENT_KERNEL
        ]
        with self._lock:
            self._counts.update(names)

    def take(self) -> tuple[tuple[str, int], ...]:
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
            counts, self._counts = self._counts, Counter()
        return tuple(sorted(counts.items()))

    def stop(self) -> None:
        if self._cupti is not None:
            self._cupti.activity_disable(_KIND_CONCURRENT_KERNEL)
            self._cupti = None
