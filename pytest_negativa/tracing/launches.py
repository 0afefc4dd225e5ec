"""Launches of each kernel, by the NVTX ranges around them, which the native library counts.

Programs and frameworks name their operations with NVTX ranges. Both are off by default.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.mappings import loaded_cupti

_RTLD_NOLOAD = 4

NVTX_INJECTION = "NVTX_INJECTION64_PATH"
"""The variable that names the library that NVTX loads at the first range (nvtxInit.h)."""

RANGES_UNAVAILABLE = "ranges-unavailable"
"""Code of a warning: launches are counted, and not by their ranges."""


class KernelLaunches(NamedTuple):
    """Launches of a kernel; see ``models.trace.Launches``."""

    name: str
    ranges: tuple[str, ...]
    launches: int
    gpu_ns: int


class LaunchCounter:
    """Counts launches by kernel name and range between two calls of ``take``.

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
        self._library.negativa_take_launches.restype = ctypes.c_void_p
        self._library.negativa_range.restype = ctypes.c_char_p
        self._cupti = os.fsencode(cupti)
        self._names: dict[int, tuple[str, ...]] = {0: ()}
        other = environ.get(NVTX_INJECTION)
        self._other = other if other and other != str(path) else None
        self._in_ranges = in_ranges
        if in_ranges and self._other is None:
            environ[NVTX_INJECTION] = str(path)

    def start(self) -> tuple[str, str] | None:
        """Count from now on; returns the code and text of a warning if something is lacking.

        Raises:
            TracerUnavailable: nothing is counted.
        """
        by_range = self._in_ranges and self._other is None
        lacking = self._library.negativa_count_launches(self._cupti, by_range)
        if lacking is not None and lacking.decode() != RANGES_UNAVAILABLE:
            raise TracerUnavailable("CUPTI doesn't count launches here")
        if lacking is not None:
            return RANGES_UNAVAILABLE, "CUPTI doesn't take NVTX ranges here"
        if self._in_ranges and self._other is not None:
            text = f"NVTX ranges go to another tool: {NVTX_INJECTION} is set to {self._other}"
            return RANGES_UNAVAILABLE, text
        return None

    def take(self) -> Iterator[KernelLaunches]:
        """Launches since the last call, by kernel name.

        Waits for the device: what a test launched may still run when the test is over.
        """
        try:
            ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD).cuCtxSynchronize()
        except OSError:
            return  # no driver in the process, no launches
        self._library.negativa_flush_launches()
        name, number, counts = ctypes.c_char_p(), ctypes.c_uint32(), (ctypes.c_uint64 * 2)()
        row = None
        while True:
            into = ctypes.byref(name), ctypes.byref(number), counts
            row = self._library.negativa_take_launches(ctypes.c_void_p(row), *into)
            if row is None:
                return
            text = (name.value or b"").decode("utf-8", "backslashreplace")
            yield KernelLaunches(text, self.names(number.value), *counts)

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
