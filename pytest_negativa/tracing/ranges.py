"""NVTX ranges around launches: programs and frameworks name their operations with them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.mappings import loaded_cupti
from pytest_negativa.tracing.native import injection_library

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
