"""Float, double and int; ``divide``, ``minimum`` and ``maximum`` have no test."""

from __future__ import annotations

import math
from array import array

import pytest
import quickstart


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f", "d", "i"])
def test_add(kind: str) -> None:
    a, b = array(kind, range(1000)), array(kind, range(1000, 0, -1))
    assert quickstart.add(a, b).tolist() == [1000] * 1000


@pytest.mark.gpu
def test_subtract_undoes_add() -> None:
    a, b = array("f", range(300)), array("f", [0.5]) * 300
    assert quickstart.subtract(quickstart.add(a, b), b) == a


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, -1.5])
def test_scale(factor: float) -> None:
    values = array("f", range(300))
    assert quickstart.scale(values, factor).tolist() == [factor * x for x in values]


@pytest.mark.gpu
def test_squares() -> None:
    values = array("d", range(50))
    assert quickstart.times(values, values).tolist() == [x * x for x in values]


@pytest.mark.gpu
def test_clamp() -> None:
    values = array("f", range(-5, 6))
    assert quickstart.clamp(values, -2, 3).tolist() == [min(max(x, -2), 3) for x in values]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f", "d"])
@pytest.mark.parametrize(("operation", "expected"), [("Exp", math.exp), ("Tanh", math.tanh)])
def test_unary(operation: str, expected: object, kind: str) -> None:
    assert callable(expected)
    values = array(kind, [i / 16 for i in range(-40, 40)])
    found = quickstart.unary(operation, values).tolist()
    assert found == pytest.approx([expected(x) for x in values], rel=1e-5)


def test_add_refuses_vectors_of_different_length() -> None:
    with pytest.raises(ValueError, match="1 and 2 values"):
        quickstart.add(array("f", [1]), array("f", [1, 2]))
