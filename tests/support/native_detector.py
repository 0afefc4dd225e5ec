"""A detector that uses the native library in this process, to compare it with ``CuptiDetector``."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

from pytest_negativa.models.trace import Context, Role
from pytest_negativa.tracing.cupti import suspects
from pytest_negativa.tracing.detector import TraceError, TracerBusy, TracerUnavailable
from pytest_negativa.tracing.mappings import Mappings
from tests.support.compiling import CC
from tests.support.libraries import SUPPORT

_NO_CUPTI, _TAKEN = 2, 3


class NativeDetector:
    """Traces this process by callbacks in C. See ``Detector``."""

    def __init__(
        self,
        trace_dir: Path,
        run_id: str,
        *,
        role: Role,
    ) -> None:
        self._arguments = (
            os.fsencode(trace_dir),
            os.fsencode(run_id),
            role.value.encode(),
            b"",
            os.fsencode(Path.cwd()),
        )
        self._trace_dir = trace_dir
        self._library: Any = None
        self._pid = os.getpid()

    def start(self) -> None:
        self._trace_dir.mkdir(parents=True, exist_ok=True)
        path = self._trace_dir.parent / "injection.so"
        flags = ("-std=gnu11", "-fPIC", "-shared", "-Wl,-z,nodelete")
        command = [
            CC or "cc",
            *flags,
            "-o",
            str(path),
            str(SUPPORT / "injection.c"),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
        library.negativa_error.restype = ctypes.c_char_p
        self._library = library
        result = library.negativa_start(*self._arguments)
        if result == 0:
            return
        problem = (library.negativa_error() or b"").decode("utf-8", "replace")
        if result == _TAKEN:
            mappings = Mappings()
            mappings.refresh()
            others = ", ".join(suspects(mappings.libraries(), os.environ))
            raise TracerBusy(f"{problem} (perhaps {others})" if others else problem)
        if result == _NO_CUPTI:
            raise TracerUnavailable(f"{problem}")
        raise TraceError(f"the trace can't be written: {problem}")

    def set_context(self, context: Context) -> None:
        if self._library is not None:
            self._library.negativa_context(
                context.phase.value.encode(), _encode(context.nodeid), _encode(context.detail)
            )

    def drain(self) -> None:
        if self._library is not None:
            self._library.negativa_drain()

    def pause(self, reason: str) -> None:
        if self._library is not None:
            self._library.negativa_pause(_encode(reason))

    def resume(self) -> None:
        if self._library is not None:
            self._library.negativa_resume()

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        if self._library is not None:
            self._library.negativa_warn(_encode(code), _encode(text), int(incomplete))

    def stop(self) -> None:
        if self._library is not None and os.getpid() == self._pid:
            self._library.negativa_stop()
            self._library = None


def _encode(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "backslashreplace")
