"""Every line of ``multiply`` runs, and all tests pass: no matrix here is large enough for the
second of its two kernels, and that is what only coverage of GPU code can tell.
"""

from __future__ import annotations

import pytest
import quickstart


def product(a: list[float], b: list[float], rows: int, inner: int, columns: int) -> list[float]:
    return [
        sum(a[row * inner + i] * b[i * columns + column] for i in range(inner))
        for row in range(rows)
        for column in range(columns)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (16, 16, 16), (33, 20, 47)])
def test_multiply(rows: int, inner: int, columns: int) -> None:
    # Small whole numbers: sums are exact in whatever order they are taken.
    a = [float(i * 7 % 13 - 6) for i in range(rows * inner)]
    b = [float(i * 5 % 11 - 5) for i in range(inner * columns)]
    found = quickstart.multiply(a, b, rows, inner, columns)
    assert list(found) == product(a, b, rows, inner, columns)


@pytest.mark.gpu
def test_multiply_by_identity() -> None:
    values = [i / 4 for i in range(40 * 40)]
    identity = [float(row == column) for row in range(40) for column in range(40)]
    assert list(quickstart.multiply(values, identity, 40, 40, 40)) == values


def test_multiply_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected 2 x 3 and 3 x 1"):
        quickstart.multiply([1.0] * 6, [1.0] * 2, 2, 3, 1)
