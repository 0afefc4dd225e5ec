"""A network of several kernels, which these tests share with those of vectors and matrices."""

from __future__ import annotations

import math
from array import array

import pytest
import quickstart

INPUTS = array("f", [i % 5 - 2 for i in range(20 * 16)])
WEIGHTS = array("f", [i % 3 - 1 for i in range(16 * 24)])
BIAS = array("f", [0.5] * 24)


@pytest.mark.gpu
@pytest.mark.inference
def test_layer() -> None:
    found = quickstart.layer(INPUTS, WEIGHTS, BIAS, 20)
    assert min(found) == 0 and found[0] == max(
        0.5 + sum(INPUTS[i] * WEIGHTS[i * 24] for i in range(16)), 0
    )


@pytest.mark.gpu
@pytest.mark.inference
def test_softmax() -> None:
    scores = array("f", range(10))
    powers = [math.exp(score) for score in scores]
    expected = [power / sum(powers) for power in powers]
    assert quickstart.softmax(scores).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
def test_standardise() -> None:
    found = quickstart.standardise(array("f", range(100)))
    assert sum(found) == pytest.approx(0, abs=1e-4)
    assert quickstart.variance(found) == pytest.approx(1, rel=1e-5)


@pytest.mark.gpu
def test_a_step_of_training() -> None:
    """The gradient of a linear layer, for a loss that is the sum of the outputs' squares."""
    outputs = quickstart.multiply(INPUTS, WEIGHTS, 20, 16, 24)
    turned = quickstart.transpose(INPUTS, 20, 16)
    gradient = quickstart.multiply(turned, outputs, 16, 20, 24)
    updated = quickstart.subtract(WEIGHTS, quickstart.scale(gradient, 1 / 1024))
    after = quickstart.multiply(INPUTS, updated, 20, 16, 24)
    loss = quickstart.total(quickstart.times(after, after))
    assert loss < quickstart.total(quickstart.times(outputs, outputs))
