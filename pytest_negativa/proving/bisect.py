"""Finds what is needed among what was removed, with few runs of the failing tests.

The one assumption: giving more back never makes a test fail. So the removed parts are put
into an order, and the shortest sequence of first parts that makes the tests pass ends in one
that is needed; with that one kept, the search goes on among those before it. A needed part costs
about log2 of its place: looking where it is likely first makes the search short (galloping
search: J. L. Bentley and A. C. Yao, "An almost optimal algorithm for unbounded searching",
1976). The result is minimal: without any one of the parts found a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Group = Callable[[T], Hashable]


@dataclass(frozen=True, slots=True)
class Needed(Generic[T]):
    """A part that is needed, and a test that failed without it (None: not known)."""

    part: T
    test: str | None


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What a search has found.

    Attributes:
        needed: the parts that are needed.
        others: parts to keep besides, because a limit ended the search before it could tell.
        complete: nothing is left to tell.
    """

    needed: tuple[Needed[T], ...]
    others: tuple[T, ...] = ()
    complete: bool = True


class LimitReached(Exception):
    """Raised by a probe that may not run any more."""


Probe = Callable[[frozenset[T]], "str | None"]
"""Runs the failing tests with these parts given back: a test that still fails, or None."""


def find_needed(
    parts: Sequence[T], probe: Probe[T], levels: Sequence[Group[T]], failing: str
) -> Found[T]:
    """A smallest set of ``parts`` with which no test fails.

    With all of them given back no test may fail, and with none at least one must.

    Args:
        parts: the likely ones first. Parts of one group stand together.
        probe: see there. May raise ``LimitReached``.
        levels: what is given back together, from large groups to small; the last one should be
            the part itself. Whole groups are ruled out before their parts are looked at.
        failing: a test that fails with nothing given back.
    """
    left = list(parts)
    found: list[Needed[Hashable]] = []
    for group in levels:
        members: dict[Hashable, list[T]] = {}
        for part in left:
            members.setdefault(group(part), []).append(part)
        search = _Search(list(members), _by_group(probe, members), failing)
        try:
            found = search.run()
        except LimitReached:
            kept = [n.part for n in search.needed]
            rest = frozenset(_flat(members, [*kept, *search.open]))
            return Found((), tuple(p for p in left if p in rest), complete=False)
        left = [part for n in reversed(found) for part in members[n.part]]
        tests = {part: n.test for n in found for part in members[n.part]}
    return Found(tuple(Needed(part, tests[part]) for part in left))


def _by_group(
    probe: Probe[T], members: Mapping[Hashable, list[T]]
) -> Callable[[Iterable[Hashable]], str | None]:
    return lambda groups: probe(_flat(members, groups))


def _flat(members: Mapping[Hashable, list[T]], keys: Iterable[Hashable]) -> frozenset[T]:
    return frozenset(part for key in keys for part in members[key])


class _Search:
    """The search among groups. ``needed`` and ``open`` (not told apart yet) at any time."""

    def __init__(
        self,
        groups: list[Hashable],
        probe: Callable[[Iterable[Hashable]], str | None],
        failing: str,
    ) -> None:
        self.needed: list[Needed[Hashable]] = []
        self.open = groups
        self._probe = probe
        self._failing: str = failing

    def run(self) -> list[Needed[Hashable]]:
        # With nothing but the needed groups: fails, or all is found.
        failing: str | None = self._failing
        while failing is not None:
            failing = self._shorten(failing)
            self.needed.append(Needed(self.open.pop(), failing))
            failing = self._run(0) if self.open else None
        self.open = []
        return self.needed

    def _shorten(self, failing: str) -> str:
        """Cut ``open`` to its shortest beginning that makes the tests pass: its end is needed.

        Returns a test that fails with one group less.
        """
        low, length = 0, 1
        while length < len(self.open):
            still = self._run(length)
            if still is None:
                del self.open[length:]
                break
            low, length, failing = length, 2 * length, still
        while len(self.open) - low > 1:
            middle = (low + len(self.open)) // 2
            still = self._run(middle)
            if still is None:
                del self.open[middle:]
            else:
                low, failing = middle, still
        return failing

    def _run(self, length: int) -> str | None:
        return self._probe([*(n.part for n in self.needed), *self.open[:length]])
