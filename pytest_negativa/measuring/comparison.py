"""Reduces runs to medians, spread and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pytest_negativa.models.measurement import Comparison, RunFigures, Summary, Variant
from pytest_negativa.reporting.measurement import FIGURES


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread of at least one value."""
    return Summary(
        runs=len(values),
        median=statistics.median(values),
        minimum=min(values),
        maximum=max(values),
    )


def compare(runs: Sequence[RunFigures]) -> Iterator[Comparison]:
    """Compare both variants by every figure that all runs have.

    The page cache is compared in the runs whose libraries had been evicted, which may be the
    warm-up alone. All other figures are compared in the runs that count.
    """
    counted = [run for run in runs if not run.warm_up]
    for figure in FIGURES:
        wanted = counted
        if figure == "cached_bytes" and all(run.cached_bytes is None for run in counted):
            wanted = [run for run in runs if run.warm_up]
        values = [(run, getattr(run, figure)) for run in wanted]
        if not values or any(value is None for _, value in values):
            continue
        original = {run.pair: value for run, value in values if run.variant is Variant.ORIGINAL}
        slim = {run.pair: value for run, value in values if run.variant is Variant.SLIM}
        before, after = summarize(tuple(original.values())), summarize(tuple(slim.values()))
        pairs = [slim[pair] / value for pair, value in original.items() if value]
        yield Comparison(
            figure=figure,
            original=before,
            slim=after,
            ratio=after.median / before.median if before.median else None,
            pair_ratios=(min(pairs), max(pairs)) if pairs else None,
            overlap=before.minimum <= after.maximum and after.minimum <= before.maximum,
        )
