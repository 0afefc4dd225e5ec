"""Launches of each kernel, by the NVTX ranges around them, which the native library counts.

Programs and frameworks name their operations with NVTX ranges. Both are off by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, MutableMapping

from pytest_negativa.devices import loaded_driver
from pytest_negativa.models.trace import Context, LaunchRecord
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.mappings import loaded_cupti

_TAKES_S = 1.0  # as often as CUPTI hands its records over

NVTX_INJECTION = "NVTX_INJECTION64_PATH"
"""The variable that names the library that NVTX loads at the first range (nvtxInit.h)."""

RANGES_UNAVAILABLE = "ranges-unavailable"
"""Code of a warning: launches are counted, and not by their ranges."""


_contexts: list[Context] = []  # by the number of the phase; the native library counts per process


class LaunchCounter:
    """Counts launches by phase of a test, kernel name and range.

    CUPTI numbers the calls of the driver in the order in which they begin. At the beginning of a
    phase, a call shows how far they are: what is launched later belongs to it, whenever the GPU
    runs it and whenever CUPTI hands over the record.

    Args:
        in_ranges: count by ranges, too.
        environ: of the process; NVTX finds the library there.

    Raises:
        TracerUnavailable: launches can't be counted; says why.
    """

    def __init__(
        self, *, in_ranges: bool = False, environ: MutableMapping[str, str] = os.environ
    ) -> None:
        path, cupti = injection_library(), loaded_cupti()
        if path is None or cupti is None:
            lacking = "the native library, which was not built" if path is None else "CUPTI's file"
            raise TracerUnavailable(f"launches can't be counted without {lacking}")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as e:
            raise TracerUnavailable(f"launches can't be counted: {e}") from e
        self._library.negativa_count_launches.restype = ctypes.c_char_p
        self._library.negativa_take_launches.restype = ctypes.c_char_p
        self._library.negativa_range.restype = ctypes.c_char_p
        self._cupti = os.fsencode(cupti)
        self._names: dict[int, tuple[str, ...]] = {0: ()}
        other = environ.get(NVTX_INJECTION)
        self._other = other if other and other != str(path) else None
        self._last_call = self._thread = 0
        self._taken_s = time.monotonic()
        self._in_ranges = in_ranges
        if in_ranges and self._other is None:
            environ[NVTX_INJECTION] = str(path)

    def start(self, context: Context) -> tuple[str, str] | None:
        """Count from now on; returns the code and text of a warning if something is lacking.

        Raises:
            TracerUnavailable: nothing is counted.
        """
        by_range = self._in_ranges and self._other is None
        lacking = self._library.negativa_count_launches(self._cupti, by_range)
        if lacking is not None and lacking.decode() != RANGES_UNAVAILABLE:
            raise TracerUnavailable("CUPTI doesn't count launches here")
        self._last_call = 0
        self.begin(context, anew=True)
        if lacking is not None:
            return RANGES_UNAVAILABLE, "CUPTI doesn't take NVTX ranges here"
        if self._in_ranges and self._other is not None:
            text = f"NVTX ranges go to another tool: {NVTX_INJECTION} is set to {self._other}"
            return RANGES_UNAVAILABLE, text
        return None

    def begin(self, context: Context, *, anew: bool = False) -> None:
        """Count later launches for ``context``.

        Args:
            anew: CUPTI may have begun to number calls anew.
        """
        _contexts.append(context)
        number = len(_contexts) - 1
        # Without a driver in the process, there are no launches.
        with contextlib.suppress(OSError):
            driver = loaded_driver()
            # Its callback calls ``called``.
            self._thread = threading.get_ident()
            driver.cuDriverGetVersion(ctypes.byref(ctypes.c_int()))
        self._library.negativa_begin_phase(
            ctypes.c_uint32(self._last_call), ctypes.c_uint32(number), anew
        )

    def called(self, number: int) -> None:
        """A call of cuDriverGetVersion begins, to which CUPTI gave this number."""
        # That of another thread may come later than it began.
        if threading.get_ident() == self._thread:
            self._last_call = number

    @property
    def is_due(self) -> bool:
        """Whether the last ``take`` was long ago."""
        return time.monotonic() - self._taken_s > _TAKES_S

    def take(self, *, all_of_them: bool) -> Iterator[tuple[Context, LaunchRecord]]:
        """Launches of each kernel since the last call, whose records lack the context's id.

        Args:
            all_of_them: wait for the device and for CUPTI; else what CUPTI handed over.
        """
        self._taken_s = time.monotonic()
        if all_of_them:
            try:
                loaded_driver().cuCtxSynchronize()
            except OSError:
                return  # no driver in the process, no launches
            self._library.negativa_flush_launches()
        numbers, counts = (ctypes.c_uint32 * 2)(), (ctypes.c_uint64 * 2)()
        first = 1
        while (name := self._library.negativa_take_launches(first, numbers, counts)) is not None:
            first = 0
            ranges = self.names(numbers[0])
            text = name.decode("utf-8", "backslashreplace")
            record = LaunchRecord(
                name=text, count=counts[0], context=0, gpu_ns=counts[1], ranges=ranges
            )
            yield _contexts[numbers[1]], record

    def names(self, number: int) -> tuple[str, ...]:
        """The names of a range and of those around it, the outermost first; of 0, none."""
        known = self._names.get(number)
        if known is None:
            parent = ctypes.c_uint32()
            name = self._library.negativa_range(ctypes.c_uint32(number), ctypes.byref(parent))
            text = (name or b"").decode("utf-8", "backslashreplace")
            known = self._names[number] = (*self.names(parent.value), text)
        return known

    def stop(self) -> None:
        """Count no more."""
        self._library.negativa_stop_launches()
