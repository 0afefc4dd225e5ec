"""A measurement as text: a table for each way of loading, sizes, ``~`` for no difference."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator

from pytest_negativa.models.measurement import (
    Comparison,
    FileSizes,
    LoadingResult,
    Measurement,
)
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_items


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _joules(value: float) -> str:
    return f"{value / 1000:,.1f} J"


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "wall_s": ("wall time", _seconds),
    "first_result_s": ("first GPU result", _seconds),
    "peak_rss_bytes": ("peak RSS, all processes", _bytes),
    "peak_pss_bytes": ("peak PSS, all processes", _bytes),
    "root_max_rss_bytes": ("maximum RSS, first process", _bytes),
    "gpu_process_bytes": ("peak GPU memory, processes", _bytes),
    "gpu_device_bytes": ("peak GPU memory, devices", _bytes),
    "energy_mj": ("energy of the GPUs", _joules),
    "cached_bytes": ("libraries in page cache", _bytes),
}
"""Title and format of each compared figure of ``RunFigures``, in the order of the report."""

_SIZES = (
    ("apparent size", "apparent_bytes"),
    ("on disk", "allocated_bytes"),
    ("tar", "tar_bytes"),
    ("tar, zstd level 3", "tar_zstd_bytes"),
)

_NO_DIFFERENCE = "~"


def render_measurement(measurement: Measurement) -> Iterator[str]:
    """The measurement, a paragraph at a time."""
    yield (
        f"{printable(shlex.join(measurement.command))}: original against slim, "
        f"{format_items(len(measurement.libraries), 'library', 'libraries')}, "
        f"{format_items(measurement.pairs, 'pair', 'pairs')} of runs in turns after one to warm up"
        + (", libraries evicted from the page cache before each run" if measurement.cold else "")
    )
    for result in measurement.results:
        if result.failure is None:
            yield _result_table(result)
        else:
            yield f"CUDA_MODULE_LOADING={result.loading.value.upper()}: no comparison"
    yield _size_table(measurement.original, measurement.slim)
    notes = list(measurement.notes)
    if any(result.comparisons for result in measurement.results):
        notes.insert(0, _chance_line(measurement.pairs))
    yield from itemize("Notes:", notes)


def _chance_line(pairs: int) -> str:
    """Note on the chance that a missing mark means nothing.

    Of all orders in which the runs of two equal variants may fall, two keep them apart.
    """
    odds = math.comb(2 * pairs, pairs) // 2
    apart = "always" if odds == 1 else f"in 1 of {odds:,} figures"
    return (
        f"{_NO_DIFFERENCE}: the runs of the two overlap from minimum to maximum, so that they show "
        f"no difference; with {format_items(pairs, 'pair', 'pairs')} equal variants would stay "
        f"apart by chance {apart}"
    )


def _result_table(result: LoadingResult) -> str:
    known = {c.figure for c in result.comparisons}
    rows = [
        _row(c)
        for c in result.comparisons
        # What is said of the processes says more than what is said of whole devices.
        if not (c.figure == "gpu_device_bytes" and "gpu_process_bytes" in known)
    ]
    table = format_table(
        "lrrrrrrl",
        ("", "original", "min to max", "slim", "min to max", "slim/original", "pairs", ""),
        rows,
        drop=((2, 4), 6, 7),
    )
    return (
        f"CUDA_MODULE_LOADING={result.loading.value.upper()}, medians with minimum and maximum, "
        f"and ratio of medians and of the single pairs:\n\n{table}"
    )


def _row(comparison: Comparison) -> list[str]:
    name, spell = FIGURES[comparison.figure]
    before, after = comparison.original, comparison.slim
    pairs = comparison.pair_ratios
    return [
        name,
        spell(before.median),
        _range(before.minimum, before.maximum, spell),
        spell(after.median),
        _range(after.minimum, after.maximum, spell),
        "-" if comparison.ratio is None else f"{comparison.ratio:.3f}",
        "-" if pairs is None else f"{pairs[0]:.3f} to {pairs[1]:.3f}",
        _NO_DIFFERENCE if comparison.overlap else "",
    ]


def _range(low: float, high: float, spell: Callable[[float], str]) -> str:
    """Both with their unit, or with one where it is the same."""
    first, last = spell(low), spell(high)
    if first == last:
        return ""
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def _size_table(original: FileSizes, slim: FileSizes) -> str:
    rows = []
    for name, field in _SIZES:
        before, after = getattr(original, field), getattr(slim, field)
        ratio = f"{after / before:.3f}" if before else "-"
        rows.append([name, format_bytes(before), format_bytes(after), ratio])
    table = format_table(
        "lrrr", ["libraries", "original", "slim", "slim/original"], rows, drop=(3,)
    )
    return f"Sizes of {format_items(original.files, 'file', 'files')}:\n\n{table}"
