"""The native library, which CUDA loads into the child processes of a traced process."""

from __future__ import annotations

from pathlib import Path


def injection_library() -> Path | None:
    """The library that CUDA loads into child processes; None: it was not built."""
    path = Path(__file__).with_name("_injection.so")
    return path if path.is_file() else None
