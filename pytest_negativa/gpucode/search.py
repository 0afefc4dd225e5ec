"""The searches of ``search.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import cast

Find = Callable[[bytes, int, int], int]
"""From bytes, their count, and where to begin: the offset of the first hit, -1 without one."""


def load_search(name: str) -> Find | None:
    """A search by its name in C; None if no compiler built them."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_search.so")))
    except OSError:
        return None
    find = library[f"negativa_find_{name}"]
    find.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    find.restype = ctypes.c_ssize_t
    return cast(Find, find)
