"""The search of ``search.c``; regular expressions if no compiler built it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path

Find = Callable[[bytes, int, int], int]
"""From bytes, their count, and where to begin: the offset of the first hit, -1 without one."""


def load_search(words: Sequence[bytes], *, before_space: bool = False) -> Find:
    """A search for any of some words; if no compiler built it, ``search_by`` a regular expression.

    Args:
        words: at most four, of three bytes or more, none of them 0.
        before_space: only with white space behind them.
    """
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_search.so")))
    except OSError:
        return search_by(words, before_space=before_space)
    search = library.negativa_find
    search.argtypes = [
        *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t),
        *(ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_bool),
    ]
    search.restype = ctypes.c_ssize_t
    array = (ctypes.c_char_p * len(words))(*words)

    def find(data: bytes, size: int, start: int) -> int:
        return int(search(data, size, start, array, len(words), before_space))

    return find


def search_by(words: Sequence[bytes], *, before_space: bool = False) -> Find:
    """The search by a regular expression, which takes many times as long as one in C."""
    pattern = b"|".join(map(re.escape, words))
    expression = re.compile(rb"(?:%b)\s" % pattern if before_space else pattern)

    def find(data: bytes, _size: int, start: int) -> int:
        found = expression.search(data, start)
        return -1 if found is None else found.start()

    return find
