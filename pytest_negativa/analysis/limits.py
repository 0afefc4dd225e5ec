"""When a run crosses limits: thresholds, coverage, growth, ``no_jit``, ``require_gpu``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.difference import Change, LibraryChange
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import Compare, Coverage, GrowthLimit, Settings, Thresholds
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.difference import compare, side_of_report
from pytest_negativa.reporting.difference import describe_change
from pytest_negativa.reporting.rows import library_row
from pytest_negativa.reporting.units import and_more, format_items, format_names
from pytest_negativa.settings.globs import LIMIT_OPTIONS, limit_of, names_of, unmatched_libraries
from pytest_negativa.storage.results import load_baseline
from pytest_negativa.storage.urls import place_of

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
            "negativa report json lists what to build ahead"
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


_UNLISTED = ": the baseline lists no kernels of it, so new ones are unknown; write it anew"
_MOST_LINES = 10
_FIGURES = ("size", "code", "unused")


class Growth(NamedTuple):
    """Growth of a run, for a report.

    Attributes:
        lines: the growth in total, and the largest changes of libraries.
        crossed: limits that were crossed.
    """

    lines: tuple[str, ...] = ()
    crossed: tuple[str, ...] = ()


def compare_with_baseline(
    report: RunReport, libraries: Sequence[AnalyzedLibrary], settings: Compare
) -> Growth:
    """Compare a run with the baseline, if there is one.

    A baseline that can't be read counts as a crossed limit: a gate must not open by itself.
    """
    if settings.baseline is None:
        return Growth()
    try:
        before = load_baseline(place_of(settings.baseline))
    except NegativaError as e:
        return Growth(crossed=(f"compare.baseline: {e}",))
    return compare_reports(before, report, libraries, settings)


def compare_reports(
    before: RunReport,
    after: RunReport,
    libraries: Sequence[AnalyzedLibrary],
    settings: Compare,
) -> Growth:
    """Compare a run with a baseline that was read."""
    changes = compare(side_of_report(before), side_of_report(after))
    not_run = {one.path: {k.name for k in one.kernels if not k.is_run} for one in after.coverage}
    untested = {
        change.path: [name for name in change.appeared if name in not_run[change.path]]
        for change in changes
        if change.appeared is not None and change.path in not_run
    }
    all_untested = [name for names in untested.values() for name in names]
    total = _figures(changes)
    crossed = [*_crossed("compare.fail", settings.fail.overall or (), total, all_untested)]
    names = {
        one.plan.library.path: names_of(one.plan.library, one.distribution) for one in libraries
    }
    for change in changes:
        if change.path in names:
            limits = limit_of(settings.fail.libraries, names[change.path]) or ()
            where = f"{change.name}: compare.fail"
            crossed += _crossed(where, limits, _figures([change]), untested.get(change.path, []))
    # Kernels that the baseline doesn't list are not new for that.
    unlisted = [c.name for c in changes if c.appeared is None and c.path in not_run]
    lines = [*_lines(total, changes, all_untested), *(f"{name}{_UNLISTED}" for name in unlisted)]
    return Growth(tuple(lines), tuple(crossed))


def _figures(changes: Iterable[LibraryChange]) -> dict[str, Change]:
    found = list(changes)
    return {name: Change.total(getattr(one, name) for one in found) for name in _FIGURES}


def _crossed(
    where: str,
    limits: Iterable[GrowthLimit],
    figures: Mapping[str, Change],
    untested: Sequence[str],
) -> Iterator[str]:
    for limit in limits:
        if limit.figure not in figures:  # new-kernels-untested
            if len(untested) > limit.limit:
                count = format_items(len(untested), "new kernel is", "new kernels are")
                yield (
                    f"{where}: {count} untested ({format_names(untested)}), "
                    f"the limit is {limit.limit:.0f}"
                )
            continue
        figure = figures[limit.figure]
        before = figure.before or 0
        allowed = before * limit.limit / 100 if limit.is_percent else limit.limit
        if figure.growth > allowed:
            most = f"{limit.limit:g}%" if limit.is_percent else format_bytes(int(limit.limit))
            yield f"{where}: {limit.figure} grew: {_describe(figure)}, the limit is {most}"


def _lines(
    total: Mapping[str, Change], changes: Sequence[LibraryChange], untested: Sequence[str]
) -> Iterator[str]:
    yield f"GPU code {_describe(total['code'])}, unused {_describe(total['unused'])}"
    changed = [one for one in changes if one.code.growth or one.unused.growth]
    for one in changed[:_MOST_LINES]:
        yield f"{one.name}: GPU code {_describe(one.code)}, unused {_describe(one.unused)}"
    yield from and_more(len(changed), _MOST_LINES, "{} more libraries changed")
    if untested:
        yield f"{format_items(len(untested), 'new kernel', 'new kernels')} without a test"


def _describe(change: Change) -> str:
    if change.before is None:
        return f"appeared with {format_bytes(change.after or 0)}"
    if change.after is None:
        return f"went, {format_bytes(change.before)}"
    return describe_change(change)
