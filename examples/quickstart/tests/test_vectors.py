"""``dot`` has no test, and ``clamp`` none either."""

from __future__ import annotations

import pytest
import quickstart


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 256, 1000])
def test_add(count: int) -> None:
    a = [0.5 * i for i in range(count)]
    b = [float(count - i) for i in range(count)]
    assert list(quickstart.add(a, b)) == [x + y for x, y in zip(a, b, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, -1.5])
def test_scale(factor: float) -> None:
    values = [float(i) for i in range(300)]
    assert list(quickstart.scale(values, factor)) == [factor * x for x in values]


@pytest.mark.gpu
def test_scale_undoes_add() -> None:
    values = [i / 8 for i in range(64)]
    assert list(quickstart.scale(quickstart.add(values, values), 0.5)) == values


def test_add_refuses_vectors_of_different_length() -> None:
    with pytest.raises(ValueError, match="1 and 2 values"):
        quickstart.add([1.0], [1.0, 2.0])
