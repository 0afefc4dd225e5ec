"""A running process to its trace file; nothing here is imported before tracing starts."""

from __future__ import annotations

from pathlib import Path


def injection_source() -> Path:
    """The native library's source, for whoever wants to build it by hand."""
    return Path(__file__).with_name("injection.c")
