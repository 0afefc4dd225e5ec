"""Every reader, on the inputs to begin with and on those that once showed a fault."""

from __future__ import annotations

import pytest

from tests.support.fuzz_targets import TARGETS, iter_seeds


@pytest.mark.parametrize("target", TARGETS)
def test_a_reader_takes_or_refuses_every_input(target: str) -> None:
    seeds = list(iter_seeds(target))
    assert seeds
    for data in seeds:
        TARGETS[target](data)
