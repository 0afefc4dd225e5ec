"""The native library, which CUDA loads into the child processes of a traced process."""

from __future__ import annotations

import ctypes
from pathlib import Path


def injection_library() -> Path | None:
    """The library that CUDA loads into child processes; None: it was not built."""
    path = Path(__file__).with_name("_injection.so")
    return path if path.is_file() else None


def leave_to_python(injection: Path) -> None:
    """Have the library leave this process alone: CUDA would load it here, too.

    Its forked children are traced by the library all the same.
    """
    ctypes.CDLL(str(injection)).negativa_leave_to_python()
