"""Mangled names to what people wrote. Only for their eyes: names are compared mangled."""

from __future__ import annotations

import functools


@functools.cache
def demangle(name: str) -> str:
    """``_Z5scalePff`` as ``scale(float*, float)``; a name that can't be demangled as it is."""
    # cxxfilt looks for a C++ runtime when it is imported, and raises where there is none.
    try:
        import cxxfilt
    except Exception:
        return name
    try:
        return str(cxxfilt.demangle(name))
    except cxxfilt.InvalidName:
        return name
