"""The search for what is needed: correct, minimal, and short."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.proving.bisect import Found, LimitReached, find_needed

Part = tuple[int, int]  # library, element

LEVELS = (lambda part: part[0], lambda part: part)


class World:
    """Parts of which some are needed, each by a test of its own."""

    def __init__(self, needed: set[Part], limit: int | None = None) -> None:
        self.needed = needed
        self.limit = limit
        self.runs = 0

    def probe(self, kept: frozenset[Part]) -> str | None:
        if self.limit is not None and self.runs >= self.limit:
            raise LimitReached
        self.runs += 1
        missing = sorted(self.needed - kept)
        return f"test of {missing[0]}" if missing else None

    def search(self, parts: list[Part]) -> Found[Part]:
        return find_needed(parts, self.probe, LEVELS, f"test of {min(self.needed)}")


PARTS = [(library, element) for library in range(8) for element in range(64)]


@given(st.sets(st.sampled_from(PARTS), min_size=1, max_size=12))
def test_finds_exactly_what_is_needed(needed: set[Part]) -> None:
    found = World(needed).search(PARTS)
    assert found.complete
    assert not found.others
    assert {n.part for n in found.needed} == needed
    assert len(found.needed) == len(needed)


@given(st.sets(st.sampled_from(PARTS), min_size=1, max_size=12))
def test_names_a_test_that_fails_without_the_part(needed: set[Part]) -> None:
    class Strict(World):
        def probe(self, kept: frozenset[Part]) -> str | None:
            # Of all tests that fail, another one each time.
            missing = sorted(self.needed - kept)
            self.runs += 1
            return f"test of {missing[self.runs % len(missing)]}" if missing else None

    world = Strict(needed)
    for one in world.search(PARTS).needed:
        named = one.test
        assert named is not None
        # With everything but this part given back, that test is the one that fails.
        assert one.part in needed
        assert named.removeprefix("test of ") in map(str, needed)


@given(st.sets(st.sampled_from(PARTS), min_size=1, max_size=12))
def test_costs_k_log_n_runs(needed: set[Part]) -> None:
    world = World(needed)
    world.search(PARTS)
    one = 2 * math.log2(8) + 2 * math.log2(64) + 4
    assert world.runs <= len(needed) * one


def test_likely_parts_first_cost_next_to_nothing() -> None:
    world = World({PARTS[0]})
    world.search(PARTS)
    assert world.runs <= 2


@pytest.mark.parametrize("limit", range(30))
def test_limit_keeps_enough(limit: int) -> None:
    needed = {(1, 5), (3, 60), (7, 0)}
    world = World(needed, limit)
    found = world.search(PARTS)
    world.limit = None
    if found.complete:
        assert {n.part for n in found.needed} == needed
    else:
        assert world.probe(frozenset(found.others)) is None
        assert found.others


def test_a_limit_that_comes_later_leaves_less() -> None:
    sizes = [
        len(World({(1, 5), (3, 60), (7, 0)}, limit).search(PARTS).others)
        for limit in (1, 8, 16, 24)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < len(PARTS) / 2
