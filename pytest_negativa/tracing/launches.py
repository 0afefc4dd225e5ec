"""Launches of each kernel, counted by CUPTI's activity records, and the NVTX ranges around them.

Programs and frameworks name their operations with NVTX ranges. Both are off by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.mappings import loaded_cupti

# CUpti_ActivityKind in cupti_activity.h: CONCURRENT_KERNEL doesn't serialise kernels.
_KIND_DRIVER = 4
_KIND_RUNTIME = 5
_KIND_CONCURRENT_KERNEL = 10
_KIND_EXTERNAL_CORRELATION = 39
# CUpti_ExternalCorrelationKind; see injection.c.
_CORRELATION_CUSTOM2 = 5
# The calls that launch kernels, from cupti_driver_cbid.h and cupti_runtime_cbid.h: with and without
# stream per thread, cooperative, of graphs, and with attributes.
_DRIVER_LAUNCHES = (307, 442, 477, 478, 480, 514, 515, 652, 653)
_RUNTIME_LAUNCHES = (211, 214, 269, 270, 311, 312, 430, 431, 505, 506)
_BUFFER_SIZE = 4 << 20
_FLUSH_FORCED = 1
_RTLD_NOLOAD = 4


class KernelLaunches(NamedTuple):
    """Launches of a kernel; see ``models.trace.Launches``."""

    name: str
    ranges: tuple[str, ...]
    launches: int
    gpu_ns: int


class _Launch(NamedTuple):
    """A launch as its activity record tells it; ``node`` is 0 outside of CUDA graphs."""

    correlation: int
    name: str
    gpu_ns: int
    node: int


class LaunchCounter:
    """Counts launches by kernel name between two calls of ``take``.

    The record of a kernel has a number in common with that of the call that launched it. A record
    of the call's range comes before that of the call, if there is one (cuptiActivityPush-
    ExternalCorrelationId in cupti_activity.h). A launch waits until its call is known.

    Args:
        ranges: count by these ranges, too.
    """

    def __init__(self, ranges: Ranges | None = None) -> None:
        self._ranges = ranges
        self._cupti: Any = None
        # Count and nanoseconds by name and range.
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}
        # By correlation: the range of a call to come, and of a call.
        self._announced: dict[int, int] = {}
        self._called: dict[int, int] = {}
        self._waiting: list[_Launch] = []
        # CUPTI hands buffers over in a thread of its own.
        self._lock = threading.Lock()

    def start(self, cupti: Any) -> None:
        self._cupti = cupti
        cupti.activity_register_callbacks(self._give_buffer, self._take_buffer)
        self._switch(cupti.activity_enable, 1)

    def _switch(self, kind: Callable[[int], None], on: int) -> None:
        kind(_KIND_CONCURRENT_KERNEL)
        if self._ranges is None:
            return
        kind(_KIND_EXTERNAL_CORRELATION)
        cupti = self._cupti
        for enable, calls in (
            (cupti.activity_enable_driver_api, _DRIVER_LAUNCHES),
            (cupti.activity_enable_runtime_api, _RUNTIME_LAUNCHES),
        ):
            for call in calls:
                # An older CUPTI lacks the newest calls.
                with contextlib.suppress(cupti.cuptiError):
                    enable(call, on)

    @staticmethod
    def _give_buffer() -> tuple[int, int]:
        return _BUFFER_SIZE, 0

    def _take_buffer(self, activities: Iterable[Any]) -> None:
        with self._lock:
            self._add(activities)

    def _add(self, activities: Iterable[Any]) -> None:
        launches, self._waiting = self._waiting, []
        for activity in activities:
            kind = activity.kind
            if kind == _KIND_CONCURRENT_KERNEL:
                # Both times are 0 if CUPTI could not tell them (cupti_activity.h).
                launches.append(
                    _Launch(
                        activity.correlation_id,
                        activity.name,
                        activity.end - activity.start,
                        activity.graph_node_id,
                    )
                )
            elif kind == _KIND_EXTERNAL_CORRELATION:
                if activity.external_kind == _CORRELATION_CUSTOM2:
                    self._announced[activity.correlation_id] = activity.external_id
            elif kind in (_KIND_DRIVER, _KIND_RUNTIME):
                call = activity.correlation_id
                self._called[call] = self._announced.pop(call, 0)
        # Without ranges no record tells of calls.
        self._count(launches, is_last=self._ranges is None)

    def _count(self, launches: Iterable[_Launch], *, is_last: bool = False) -> None:
        called, counts = self._called, self._counts
        for launch in launches:
            number = called.get(launch.correlation)
            if number is None:
                if not is_last:
                    self._waiting.append(launch)
                    continue
                number = 0
            elif not launch.node:
                # The launch of a graph has a record for each of its kernels.
                del called[launch.correlation]
            count, gpu_ns = counts.get((launch.name, number), (0, 0))
            counts[launch.name, number] = (count + 1, gpu_ns + launch.gpu_ns)

    def take(self) -> tuple[KernelLaunches, ...]:
        """Launches since the last call, by kernel name.

        Waits for the device: what a test launched may still run when the test is over.
        """
        if self._cupti is None:
            return ()
        try:
            ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD).cuCtxSynchronize()
        except OSError:
            return ()  # no driver in the process, no launches
        self._cupti.activity_flush_all(_FLUSH_FORCED)
        return self._take_counts()

    def _take_counts(self) -> tuple[KernelLaunches, ...]:
        with self._lock:
            self._count(self._waiting, is_last=True)
            counts = self._counts
            self._counts, self._announced, self._called, self._waiting = {}, {}, {}, []
        return tuple(
            KernelLaunches(name, self._ranges.names(number) if self._ranges else (), *found)
            for (name, number), found in sorted(counts.items())
        )

    def stop(self) -> None:
        if self._cupti is not None:
            self._switch(self._cupti.activity_disable, 0)
            self._cupti = None


NVTX_INJECTION = "NVTX_INJECTION64_PATH"
"""The variable that names the library that NVTX loads at the first range (nvtxInit.h)."""


class Ranges:
    """The ranges of this process, which the native library numbers.

    The library tells CUPTI the number of the range that each thread is in.

    Args:
        environ: of the process.

    Raises:
        TracerUnavailable: the ranges can't be seen; says why.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        injection, cupti = injection_library(), loaded_cupti()
        if injection is None:
            raise TracerUnavailable("NVTX ranges need the native library, which was not built")
        other = environ.get(NVTX_INJECTION)
        if other and other != str(injection):
            raise TracerUnavailable(
                f"NVTX ranges go to another tool: {NVTX_INJECTION} is set to {other}"
            )
        try:
            self._library = ctypes.CDLL(str(injection))
        except OSError as e:
            raise TracerUnavailable(f"NVTX ranges need the native library: {e}") from e
        self._library.negativa_range.restype = ctypes.c_char_p
        if cupti is None or self._library.negativa_watch_ranges(os.fsencode(cupti)) != 0:
            raise TracerUnavailable(
                f"NVTX ranges can't be told to CUPTI ({cupti or 'its file is not known'})"
            )
        self._names: dict[int, tuple[str, ...]] = {0: ()}
        environ[NVTX_INJECTION] = str(injection)

    def names(self, number: int) -> tuple[str, ...]:
        """The names of a range and of those around it, the outermost first; of 0, none."""
        known = self._names.get(number)
        if known is None:
            parent = ctypes.c_uint32()
            name = self._library.negativa_range(ctypes.c_uint32(number), ctypes.byref(parent))
            text = (name or b"").decode("utf-8", "backslashreplace")
            known = self._names[number] = (*self.names(parent.value), text)
        return known
