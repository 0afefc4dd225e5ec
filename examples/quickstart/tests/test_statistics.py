"""``product``, ``histogram`` and double precision have no test."""

from __future__ import annotations

import statistics
from array import array

import pytest
import quickstart


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 255, 2048])
def test_total(count: int) -> None:
    values = array("f", [i % 100 for i in range(count)])
    assert quickstart.total(values) == sum(values)


@pytest.mark.gpu
def test_extremes() -> None:
    values = array("f", [i * 7 % 13 - 6 for i in range(1000)])
    assert (quickstart.smallest(values), quickstart.largest(values)) == (-6, 6)


@pytest.mark.gpu
def test_variance() -> None:
    values = array("f", range(100))
    assert quickstart.variance(values) == pytest.approx(statistics.pvariance(values))


@pytest.mark.gpu
def test_running_sum() -> None:
    found = quickstart.running_sum(array("i", range(600)))
    assert found.tolist() == [i * (i + 1) // 2 for i in range(600)]
