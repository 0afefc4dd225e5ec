"""Spans behave as the sets of their bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.models.spans import (
    Range,
    Span,
    around,
    covers,
    intersection,
    minus,
    size,
    union,
    within,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def bytes_of(*spans: Range) -> set[int]:
    return {byte for start, end in spans for byte in range(start, end)}


@given(SPANS)
def test_union(spans: list[Range]) -> None:
    united = union(spans)
    assert bytes_of(*united) == bytes_of(*spans)
    assert all(before.end < after.start for before, after in pairwise(united))
    assert all(span.size > 0 for span in united)
    assert union(united) == united
    assert size(united) == len(bytes_of(*spans)) == sum(span.size for span in united)


@given(SPANS, SPANS)
def test_intersection_and_minus(spans: list[Range], others: list[Range]) -> None:
    """Each part lies in one span, so borders between the spans stay."""
    disjoint = union(others)
    for span in spans:
        inside, outside = intersection([span], disjoint), minus([span], disjoint)
        parts = (*inside, *outside)
        assert sorted(parts) == sorted(set(parts))
        assert all(part.size > 0 for part in parts)
    inside, outside = intersection(spans, disjoint), minus(spans, disjoint)
    assert bytes_of(*inside) == bytes_of(*spans) & bytes_of(*others)
    assert bytes_of(*outside) == bytes_of(*spans) - bytes_of(*others)


@given(SPANS, SPANS)
def test_minus_of_spans_that_meet_but_are_not_united(spans: list[Range], cuts: list[Range]) -> None:
    """Disjoint spans may touch, as neighbours in a file do."""
    pieces = sorted(
        set(minus(union(spans), union(cuts))) | set(intersection(union(spans), union(cuts)))
    )
    assert bytes_of(*minus(cuts, pieces)) == bytes_of(*cuts) - bytes_of(*spans)


@given(SPANS, st.integers(0, 60), st.integers(1, 20))
def test_covers(spans: list[Range], start: int, length: int) -> None:
    end = start + length
    assert covers(union(spans), start, end) == (bytes_of((start, end)) <= bytes_of(*spans))


@given(SPANS, st.sampled_from([1, 4, 7]))
def test_pages(spans: list[Range], page: int) -> None:
    touched = {byte // page for byte in bytes_of(*spans)}
    assert bytes_of(*around(spans, page)) == {b for b in range(70) if b // page in touched}
    for span in spans:
        whole = [p for p in range(70) if bytes_of((p * page, (p + 1) * page)) <= bytes_of(span)]
        assert bytes_of(*within([span], page)) == bytes_of(
            *((p * page, (p + 1) * page) for p in whole)
        )


def test_a_span_is_a_pair() -> None:
    assert Span(1, 3) == (1, 3)
    assert {Span(1, 3)} == {(1, 3)}
