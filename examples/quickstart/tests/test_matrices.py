"""Every line of ``multiply`` runs, and all tests pass: no matrix here is large enough for the
third of its kernels, and that is what only coverage of GPU code can tell.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import quickstart


def product(a: Any, b: Any, rows: int, inner: int, columns: int) -> list[float]:
    return [
        sum(a[row * inner + i] * b[i * columns + column] for i in range(inner))
        for row in range(rows)
        for column in range(columns)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f", "i"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (15, 16, 15), (33, 20, 47)])
def test_multiply(rows: int, inner: int, columns: int, kind: str) -> None:
    # Small whole numbers: sums are exact in whatever order they are taken.
    a = array(kind, [i * 7 % 13 - 6 for i in range(rows * inner)])
    b = array(kind, [i * 5 % 11 - 5 for i in range(inner * columns)])
    found = quickstart.multiply(a, b, rows, inner, columns)
    assert found.tolist() == product(a, b, rows, inner, columns)


@pytest.mark.gpu
def test_multiply_by_identity() -> None:
    values = array("f", [i / 4 for i in range(40 * 40)])
    identity = array("f", [row == column for row in range(40) for column in range(40)])
    assert quickstart.multiply(values, identity, 40, 40, 40) == values


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_solve(size: int) -> None:
    systems = array("d", [1 + 4 * (i % (size + 1) == 0) for i in range(size * size)] * 10)
    right = array("d", range(size * 10))
    found = quickstart.solve(systems, right, size)
    back = [
        value
        for at in range(0, len(right), size)
        for value in product(systems[: size * size], found[at : at + size], size, size, 1)
    ]
    assert back == pytest.approx(right.tolist())


def test_multiply_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected 2 x 3 and 3 x 1"):
        quickstart.multiply(array("f", [1] * 6), array("f", [1] * 2), 2, 3, 1)
