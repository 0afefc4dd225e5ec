"""``variance`` and ``histogram`` have no test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import quickstart


@pytest.fixture
def default_weights() -> Iterator[None]:
    yield
    quickstart.set_weights([1.0, 1.0, 1.0, 1.0])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 255, 2048])
def test_sum_with_default_weights(count: int) -> None:
    values = [float(i % 100) for i in range(count)]
    assert quickstart.weighted_sum(values) == sum(values)


@pytest.mark.gpu
@pytest.mark.usefixtures("default_weights")
def test_weights_are_used_in_turn() -> None:
    quickstart.set_weights([1.0, -1.0, 0.0, 10.0])
    assert quickstart.weighted_sum([1.0, 2.0, 3.0, 4.0, 5.0]) == 1 - 2 + 40 + 5


def test_four_weights_are_needed() -> None:
    with pytest.raises(ValueError, match="3 weights"):
        quickstart.set_weights([1.0, 2.0, 3.0])
