"""Runs to medians, spread and ratios."""

from __future__ import annotations

import pytest

from pytest_negativa.measuring.session import compare, summarize
from pytest_negativa.models.measurement import Loading, RunFigures, Summary, Variant


def run(variant: Variant, pair: int, wall: float, **figures: int | float | None) -> RunFigures:
    return RunFigures(
        variant=variant, loading=Loading.LAZY, warm_up=pair == 0, pair=pair, status=0, wall_s=wall,
        **figures,  # type: ignore[arg-type]
    )  # fmt: skip


def runs(before: list[float], after: list[float]) -> list[RunFigures]:
    """The first of each is the warm-up."""
    originals = [run(Variant.ORIGINAL, i, wall) for i, wall in enumerate(before)]
    return originals + [run(Variant.SLIM, i, wall) for i, wall in enumerate(after)]


def test_summary() -> None:
    assert summarize([5, 1, 2, 4, 3]) == Summary(runs=5, median=3, minimum=1, maximum=5)


def test_warm_up_does_not_count() -> None:
    (wall,) = compare(runs([99, 4, 5, 6], [98, 1, 2, 3]))
    assert (wall.figure, wall.original.median, wall.slim.median) == ("wall_s", 5, 2)
    assert wall.ratio == pytest.approx(0.4)
    assert wall.pair_ratios == pytest.approx((1 / 4, 3 / 6))
    assert not wall.overlap


@pytest.mark.parametrize(
    ("after", "overlap"), [([1, 2, 3.9], False), ([1, 2, 4], True), ([7, 8, 9], False)]
)
def test_overlap(after: list[float], overlap: bool) -> None:
    (wall,) = compare(runs([0, 4, 5, 6], [0, *after]))
    assert wall.overlap is overlap


def test_a_figure_that_some_run_lacks_is_not_compared() -> None:
    original = [run(Variant.ORIGINAL, i, 1, peak_rss_bytes=10) for i in range(3)]
    slim = [run(Variant.SLIM, i, 1, peak_rss_bytes=5 if i != 2 else None) for i in range(3)]
    assert [c.figure for c in compare(original + slim)] == ["wall_s"]


def test_no_ratio_to_nothing() -> None:
    found = compare([run(v, i, 1, gpu_device_bytes=0) for v in Variant for i in range(3)])
    assert [(c.figure, c.ratio, c.pair_ratios) for c in found] == [
        ("wall_s", 1, (1, 1)),
        ("gpu_device_bytes", None, None),
    ]


def test_page_cache_is_of_the_runs_that_began_without() -> None:
    warm = [run(v, i, 1, cached_bytes=100 if i == 0 else None) for v in Variant for i in range(3)]
    cold = [run(v, i, 1, cached_bytes=100 * i) for v in Variant for i in range(4)]
    (of_warm_up,) = (c for c in compare(warm) if c.figure == "cached_bytes")
    (of_all,) = (c for c in compare(cold) if c.figure == "cached_bytes")
    assert (of_warm_up.original.runs, of_warm_up.original.median) == (1, 100)
    assert (of_all.original.runs, of_all.original.median) == (3, 200)
