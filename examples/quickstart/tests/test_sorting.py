"""``sort_rows`` has no test."""

from __future__ import annotations

from array import array

import pytest
import quickstart


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f", "i"])
def test_sort(kind: str) -> None:
    values = array(kind, [i * 37 % 101 for i in range(500)])
    assert quickstart.sort(values).tolist() == sorted(values)


@pytest.mark.gpu
def test_sorting_the_negative_values_reverses() -> None:
    values = array("f", [i * 37 % 101 for i in range(101)])
    assert quickstart.sort(quickstart.unary("Negate", values)).tolist() == list(range(-100, 1))
