"""Finds the needed parts among the removed ones, with few runs of the failing tests.

The search assumes that giving more back never makes a test fail. The removed parts are ordered, the
likely ones first. A galloping search finds a beginning of that order that suffices, and QuickXplain
(U. Junker, AAAI 2004) a minimal set within it. QuickXplain divides the parts by library, then by
region, then by element, and searches one half with the other half given back. For k needed parts
among n it takes about 2 k log2(n / k) + 2 k runs at most. The result is minimal: without any one of
its parts a test fails. A smaller set of other parts may suffice, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_FIRST_LENGTH = 16
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Needed(Generic[T]):
    """A needed part, and a test that failed without it."""

    part: T
    test: str


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """The result of a search.

    Attributes:
        needed: the parts that are needed; empty if a limit ended the search.
        enough: the smallest set that is known to suffice.
        complete: no limit ended the search.
    """

    needed: tuple[Needed[T], ...]
    enough: tuple[T, ...]
    complete: bool


class LimitReached(Exception):
    """A limit forbids further probes."""


Probe = Callable[[frozenset[T]], "str | None"]
"""Runs the failing tests with these parts given back; a test that still fails, or None."""


def find_needed(
    parts: Sequence[T],
    probe: Probe[T],
    groups: Sequence[Callable[[T], Hashable]],
    failing: str,
) -> Found[T]:
    """A minimal set of ``parts`` with which no test fails.

    The caller has made sure that no test fails with all parts given back, and that one fails with
    none.

    Args:
        parts: the likely ones first; at least one.
        probe: see ``Probe``. It may raise ``LimitReached``.
        groups: the keys of groups, from large groups to small ones. Parts are divided between
            groups if possible.
        failing: a test that fails with no part given back.
    """
    search = _Search(parts, probe, groups)
    try:
        needed = search.run(failing)
    except LimitReached:
        return Found((), tuple(p for p in parts if p in search.enough), complete=False)
    return Found(tuple(needed), tuple(n.part for n in needed), complete=True)


class _Search(Generic[T]):
    """One search. ``enough`` is always the smallest set that is known to suffice."""

    def __init__(
        self,
        parts: Sequence[T],
        probe: Probe[T],
        groups: Sequence[Callable[[T], Hashable]],
    ) -> None:
        self.enough = frozenset(parts)
        self._parts = parts
        self._probe = probe
        self._groups = groups

    def run(self, failing: str) -> list[Needed[T]]:
        length = _FIRST_LENGTH
        while length < len(self._parts):
            still = self._fails(frozenset(self._parts[:length]))
            if still is None:
                break
            length *= _GROWTH
        return self._explain(frozenset(), self._parts[:length], failing)

    def _explain(
        self, base: frozenset[T], parts: Sequence[T], failing: str | None
    ) -> list[Needed[T]]:
        """The parts that are needed besides ``base``; with all of them tests pass.

        Args:
            failing: a test that fails with ``base`` alone; None if that is not known yet.
        """
        if failing is None and (failing := self._fails(base)) is None:
            return []
        if len(parts) == 1:
            return [Needed(parts[0], failing)]
        first, second = self._divide(parts)
        of_second = self._explain(base | frozenset(first), second, None)
        added = frozenset(n.part for n in of_second)
        of_first = self._explain(base | added, first, None if added else failing)
        return of_first + of_second

    def _fails(self, kept: frozenset[T]) -> str | None:
        failing = self._probe(kept)
        if failing is None and len(kept) < len(self.enough):
            self.enough = kept
        return failing

    def _divide(self, parts: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Two halves, cut between groups of the largest kind that has more than one group."""
        middle = len(parts) // 2
        for group in self._groups:
            keys = [group(part) for part in parts]
            cuts = [i for i in range(1, len(parts)) if keys[i] != keys[i - 1]]
            if cuts:
                middle = min(cuts, key=lambda cut: abs(cut - len(parts) // 2))
                break
        return parts[:middle], parts[middle:]
