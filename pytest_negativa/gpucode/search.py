"""The searches of ``search.c``; regular expressions if no compiler built them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

Find = Callable[[bytes, int, int], int]
"""From bytes, their count, and where to begin: the offset of the first hit, -1 without one."""


def load_search(name: str, pattern: bytes) -> Find:
    """A search by its name in C; if no compiler built them, ``search_by`` the pattern."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_search.so")))
    except OSError:
        return search_by(pattern)
    find = library[f"negativa_find_{name}"]
    find.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    find.restype = ctypes.c_ssize_t
    return cast(Find, find)


def any_of(words: Iterable[bytes]) -> bytes:
    """The regular expression of words."""
    return b"|".join(map(re.escape, words))


def search_by(pattern: bytes) -> Find:
    """The search for a regular expression, which takes many times as long as one in C."""
    expression = re.compile(pattern)

    def find(data: bytes, _size: int, start: int) -> int:
        found = expression.search(data, start)
        return -1 if found is None else found.start()

    return find
