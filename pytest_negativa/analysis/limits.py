"""When a run crosses limits: thresholds, coverage, ``no_jit``, ``require_gpu``, one of no library.

The limits of growth are in ``snapshots``, which also compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import Coverage, Settings, Thresholds
from pytest_negativa.models.trace import Usage
from pytest_negativa.reporting.rows import library_row
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import LIMIT_OPTIONS, limit_of, names_of, unmatched_libraries

# The kernels of files that are GPU code are not known, so no limit on them checks anything.
_OF_KERNELS = (
    "coverage.libraries",
    "coverage.fail_under",
    "thresholds.min_used_kernels",
)


def find_crossed(
    settings: Settings,
    usage: Usage,
    report: RunReport,
    libraries: Sequence[AnalyzedLibrary],
    growth: Iterable[str],
) -> Iterator[str]:
    """The limits of the settings that a run crosses, a sentence each.

    Args:
        growth: the crossed limits of growth since the baseline.
    """
    if settings.require_gpu and (usage.replay is not None or not usage.devices):
        yield "require_gpu: no GPU code was loaded on a GPU here"
    yield from crossed_thresholds(
        {key: getattr(settings.thresholds, key).overall for key in Thresholds.__struct_fields__},
        gpu_code=report.code_bytes,
        unused_bytes=report.unused_bytes,
        used_kernels=sum(row.used_kernels for row in report.libraries),
    )
    yield from crossed_coverage(
        settings.coverage, [one.coverage for one in libraries if one.coverage is not None]
    )
    if settings.no_jit and (new := [one for one in report.runtime if one.is_new]):
        kernels = format_items(len({n for one in new for n in one.kernels}), "kernel", "kernels")
        yield (
            f"no_jit: the tests compiled {kernels}, the first in {new[0].first}; "
            "negativa kernels --jit lists what to build ahead"
        )
    yield from _crossed_by_library(settings, libraries)
    yield from growth
    yield from _limits_of_nothing(settings, libraries)
    yield from report.unchecked if settings.has_limits else ()


def _crossed_by_library(settings: Settings, libraries: Iterable[AnalyzedLibrary]) -> Iterator[str]:
    for one in libraries:
        names, row = names_of(one.plan.library, one.distribution), library_row(one.plan)
        crossed = crossed_thresholds(
            {
                key: limit_of(getattr(settings.thresholds, key).libraries, names)
                for key in Thresholds.__struct_fields__
                if key != "min_used_kernels" or not row.is_files
            },
            gpu_code=row.code_bytes,
            unused_bytes=row.unused_bytes,
            used_kernels=row.used_kernels,
        )
        yield from (f"{Path(names.path).name}: {text}" for text in crossed)


def _limits_of_nothing(settings: Settings, libraries: Sequence[AnalyzedLibrary]) -> Iterator[str]:
    """Limits whose glob matches nothing that was analysed: what checks nothing must not pass."""
    covers = ("coverage.libraries",) if settings.coverage.fail_under.overall is not None else ()
    for option in (*LIMIT_OPTIONS, *covers):
        counted = (one for one in libraries if not (one.plan.is_files and option in _OF_KERNELS))
        yield from unmatched_libraries(
            settings, option, [names_of(one.plan.library, one.distribution) for one in counted]
        )


def crossed_coverage(limits: Coverage, libraries: Sequence[LibraryCoverage]) -> Iterator[str]:
    """The crossed limits, a sentence each; a value equal to its limit crosses nothing.

    Without a kernel nothing is tested, so ``fail_under`` is crossed.
    """
    yield from (
        f"fail_under: {share} of {Path(one.path).name} {one.word}, the limit is {one.limit:.12g}%"
        for one in libraries
        if one.limit is not None and (share := _below(len(one.kernels), one.run_kernels, one.limit))
    )
    least = limits.fail_under.overall
    kernels = sum(len(one.kernels) for one in libraries)
    run = sum(one.run_kernels for one in libraries)
    if least is not None and not kernels:
        yield (
            "fail_under: no loaded library of the project has kernels; name its libraries in "
            "coverage.libraries"
        )
    elif least is not None and (share := _below(kernels, run, least)):
        word = "run" if all(one.counted for one in libraries) else "looked up"
        yield f"fail_under: {share} of the project's kernels {word}, the limit is {least:.12g}%"


def crossed_thresholds(
    limits: Mapping[str, Any], *, gpu_code: int, unused_bytes: int, used_kernels: int
) -> Iterator[str]:
    """The crossed thresholds, a sentence each; a value equal to its limit crosses nothing.

    Percentages are exact, not rounded. Without GPU code, no percentage exists, so none crosses a
    limit.

    Args:
        limits: by name of a field of ``Thresholds``; None for no limit.
        gpu_code, unused_bytes: sizes in bytes.
        used_kernels: number of kernels.
    """
    most, least, largest = map(limits.get, Thresholds.__struct_fields__)
    if gpu_code and most is not None and (unused := 100 * unused_bytes / gpu_code) > most:
        yield (
            f"max_unused_percent: {_percent(unused, most)} of the GPU code is unused, "
            f"the limit is {most:.12g}%"
        )
    if least is not None and used_kernels < least:
        yield (
            f"min_used_kernels: {format_items(used_kernels, 'kernel is', 'kernels are')} used, "
            f"the limit is {least:,}"
        )
    if largest is not None and gpu_code > largest:
        yield (
            f"max_gpu_code: there are {gpu_code:,} bytes of GPU code, "
            f"the limit is {format_items(largest, 'byte', 'bytes')}"
        )


def _percent(share: float, limit: float) -> str:
    """A percentage with the fewest decimals, one at least, that show which side of a limit it is.

    The two differ.
    """
    texts = [f"{share:.{digits}f}" for digits in range(1, 15)]
    return next((t for t in texts if (float(t) - limit) * (share - limit) > 0), texts[-1]) + "%"


def _below(whole: int, part: int, limit: float) -> str:
    """The share of ``part`` in words if it is below the limit, else nothing."""
    share = 100 * part / whole if whole else 100.0
    return f"{_percent(share, limit)} ({part:,} of {whole:,})" if share < limit else ""
