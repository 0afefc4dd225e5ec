"""The search for what is needed: correct, minimal, and short."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.verifying.bisect import Found, LimitReached, find_needed

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


some = given(st.sets(st.sampled_from(PARTS), min_size=1, max_size=12))


@some
def test_finds_exactly_what_is_needed(needed: set[Part]) -> None:
    found = World(needed).search(PARTS)
    assert found.complete
    assert {n.part for n in found.needed} == needed
    assert len(found.needed) == len(needed)
    assert set(found.enough) == needed


@some
def test_names_a_test_that_fails_without_the_part(needed: set[Part]) -> None:
    # Every part but one is given back when a part is found to be needed, so only its own test
    # can have failed; a search that named any test it had seen would name another one.
    class Latest(World):
        def probe(self, kept: frozenset[Part]) -> str | None:
            missing = sorted(self.needed - kept, reverse=True)
            self.runs += 1
            return f"test of {missing[0]}" if missing else None

    for one in Latest(needed).search(PARTS).needed:
        assert one.test in {f"test of {part}" for part in needed}
    for one in World({min(needed)}).search(PARTS).needed:
        assert one.test == f"test of {min(needed)}"


@some
def test_costs_k_log_n_runs(needed: set[Part]) -> None:
    world = World(needed)
    world.search(PARTS)
    k, n = len(needed), len(PARTS)
    # Uneven groups cost a little more than the even halves of the bound.
    assert world.runs <= 2 * k * math.log2(n / k) + 4 * k + 5


def test_all_are_needed() -> None:
    parts = PARTS[:20]
    world = World(set(parts))
    found = world.search(parts)
    assert {n.part for n in found.needed} == set(parts)
    assert world.runs <= 2 * len(parts)


def test_likely_parts_first_cost_little() -> None:
    world = World({PARTS[0]})
    world.search(PARTS)
    assert world.runs <= 10


def test_divides_between_libraries_first() -> None:
    seen: list[frozenset[Part]] = []
    parts = [(0, i) for i in range(2)] + [(1, i) for i in range(9)]

    def probe(kept: frozenset[Part]) -> str | None:
        seen.append(kept)
        return None if (1, 8) in kept else "test"

    find_needed(parts, probe, LEVELS, "test")
    assert seen[0] == frozenset(parts[:2])


@pytest.mark.parametrize("limit", range(40))
def test_limit_keeps_enough(limit: int) -> None:
    needed = {(1, 5), (3, 60), (7, 0)}
    world = World(needed, limit)
    found = world.search(PARTS)
    world.limit = None
    assert world.probe(frozenset(found.enough)) is None
    assert found.complete == bool(found.needed)


def test_a_later_limit_leaves_less() -> None:
    sizes = [
        len(World({(1, 5), (3, 60), (7, 0)}, limit).search(PARTS).enough)
        for limit in (1, 12, 24, 48)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1]
    assert sizes[-1] == 3
