"""Demangled C++ names, for display only: all comparisons use mangled names."""

from __future__ import annotations

import functools


@functools.cache
def demangle(name: str) -> str:
    """``_Z5scalePff`` to ``scale(float*, float)``; other names stay as they are."""
    # cxxfilt looks for a C++ runtime when it is imported, and raises if there is none.
    try:
        import cxxfilt
    except Exception:
        return name
    try:
        return str(cxxfilt.demangle(name))
    except (cxxfilt.InvalidName, UnicodeError):
        return name
