"""The native library: where it is, and the detector that uses it on this process.

``NativeDetector`` does what ``CuptiDetector`` does, with callbacks in C that need no GIL. It is
not the default: cupti-python finds and checks the right CUPTI, this one takes what it gets.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from pytest_negativa.models.trace import Context, Role
from pytest_negativa.tracing.conflicts import suspects
from pytest_negativa.tracing.detector import TraceError, TracerBusy, TracerUnavailable
from pytest_negativa.tracing.mappings import Mappings

_NO_FILE, _NO_CUPTI, _TAKEN = 1, 2, 3


def injection_library() -> Path | None:
    """The library that CUDA loads into child processes; None: it was not built."""
    path = Path(__file__).with_name("_injection.so")
    return path if path.is_file() else None


class NativeDetector:
    """Traces this process by callbacks in C. See ``Detector``."""

    def __init__(
        self,
        trace_dir: Path,
        run_id: str,
        *,
        role: Role,
        worker: str | None = None,
        root: Path | None = None,
    ) -> None:
        self._arguments = (
            os.fsencode(trace_dir),
            os.fsencode(run_id),
            role.value.encode(),
            os.fsencode(worker or ""),
            os.fsencode(root or Path.cwd()),
        )
        self._trace_dir = trace_dir
        self._library: Any = None
        self._pid = os.getpid()

    def start(self) -> None:
        path = injection_library()
        if path is None:
            raise TracerUnavailable(
                "the native library was not built; install pytest-negativa again where there is "
                "a C compiler"
            )
        library = ctypes.CDLL(str(path))
        library.negativa_error.restype = ctypes.c_char_p
        library.negativa_trace_path.restype = ctypes.c_char_p
        self._trace_dir.mkdir(parents=True, exist_ok=True)
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
            raise TracerUnavailable(f"{problem}; install pytest-negativa[cu13]")
        raise TraceError(f"the trace can't be written: {problem}")

    @property
    def path(self) -> Path:
        """The trace file, once started."""
        return Path(os.fsdecode(self._library.negativa_trace_path()))

    def set_context(self, context: Context) -> None:
        if self._library is not None:
            self._library.negativa_context(
                context.phase.value.encode(), _encode(context.nodeid), _encode(context.detail)
            )

    def drain(self) -> None:
        if self._library is not None:
            self._library.negativa_drain()

    def pause(self, why: str) -> None:
        if self._library is not None:
            self._library.negativa_pause(_encode(why))

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
