"""Whether a test ended on the copies as it did when it was traced, in all that is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pytest_negativa.models.outcomes import Aspect, TestResult
from pytest_negativa.models.verdict import AspectChange


def same_outcome(before: TestResult, after: TestResult, tolerate: Collection[Aspect]) -> bool:
    """Whether outcomes are equal, and all aspects that are not tolerated."""
    return before.outcome is after.outcome and all(
        change.tolerated for change in changed_aspects(before, after, tolerate)
    )


def changed_aspects(
    before: TestResult, after: TestResult, tolerate: Collection[Aspect]
) -> tuple[AspectChange, ...]:
    """The aspects in which two equal outcomes differ; none of outcomes that differ themselves."""
    if before.outcome is not after.outcome:
        return ()
    return tuple(
        AspectChange(
            aspect=aspect,
            before=_only_in(before, after, aspect),
            after=_only_in(after, before, aspect),
            tolerated=aspect in tolerate,
        )
        for aspect in Aspect
        if before.aspects.get(aspect, ()) != after.aspects.get(aspect, ())
    )


def _only_in(test: TestResult, other: TestResult, aspect: Aspect) -> tuple[str, ...]:
    left = Counter(test.aspects.get(aspect, ())) - Counter(other.aspects.get(aspect, ()))
    return tuple(sorted(left.elements()))
