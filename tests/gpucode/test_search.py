"""The search in C misses no place, wherever it lies; see also ``tests.fuzz.test_properties``."""

from __future__ import annotations

import pytest

from pytest_negativa.gpucode.ptx import DIRECTIVES
from pytest_negativa.gpucode.scan import ALL_MAGICS, REGION_MAGICS
from pytest_negativa.gpucode.search import load_search


@pytest.mark.parametrize(
    ("words", "word"),
    [
        *((REGION_MAGICS, magic) for magic in REGION_MAGICS),
        *((ALL_MAGICS, magic) for magic in ALL_MAGICS),
        *((DIRECTIVES, word) for word in (b".entry ", b".entry\t")),
    ],
)
def test_each_place_is_found(words: tuple[bytes, ...], word: bytes) -> None:
    find = load_search(words, before_space=words == DIRECTIVES)
    # The search looks at 64 bytes at a time as long as these hold no candidate.
    size = 300
    for at in range(size - len(word) + 1):
        data = (bytes(at) + word).ljust(size, b"\0")
        for start in (0, at // 2, at):
            assert find(data, size, start) == at
        assert find(data, size, at + 1) == -1
