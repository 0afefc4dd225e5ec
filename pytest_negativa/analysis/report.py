"""An analysis to the ``RunReport`` that all renderers share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.analysis.analyze import LIMIT_OPTIONS, library_candidates
from pytest_negativa.analysis.baseline import BaselineComparison, compare_with_baseline, names_of
from pytest_negativa.installed.sites import Places, is_installed
from pytest_negativa.models.analysis import Analysis, AnalyzedLibrary
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.lock import Place
from pytest_negativa.models.report import REPORT_VERSION, LibraryRow, RunReport
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.reporting.rows import library_row
from pytest_negativa.settings.globs import (
    LibraryNames,
    globs_of,
    limit_of,
    matches_library,
    unmatched_globs,
)

# The kernels of files that are GPU code are not known, so no limit on them checks anything.
_OF_KERNELS = (
    "coverage.libraries",
    "coverage.fail_under",
    "thresholds.min_used_kernels",
)


def build_report(
    analysis: Analysis,
    settings: Settings,
    *,
    run_id: str,
    directory: str,
    files: Sequence[str],
    part: str | None = None,
) -> RunReport:
    """Rows, totals and everything a reader must know, the largest libraries first."""
    places = Places()
    rows = tuple(
        with_owner(row, places.of(row.path)) if is_installed(row.path) else row
        for row in rows_of(analysis.libraries)
    )
    usage = analysis.usage
    checked = check_limits(settings, usage, analysis.libraries, unchecked=analysis.unchecked)
    warnings = dict.fromkeys([*(w.text for w in usage.warnings), *analysis.warnings])
    return RunReport(
        format_version=REPORT_VERSION,
        run_id=run_id,
        directory=directory,
        devices=tuple(dict.fromkeys(f"{d.name} ({d.compute_capability})" for d in usage.devices)),
        replay=_replay_line(usage),
        gpu_used=any(True for _ in usage.iter_images()),
        libraries=rows,
        loaded_without_code=analysis.without_code,
        compiled_kernels=analysis.runtime_kernels,
        not_covered=tuple(_not_covered(analysis)),
        warnings=tuple(text for text in warnings if text not in checked.crossed),
        crossed=checked.crossed,
        files=tuple(files),
        coverage=_covered(analysis.libraries),
        compared=checked.lines,
        part=part,
        unchecked=analysis.unchecked,
    )


def with_owner(row: LibraryRow, owner: Place | LibraryRow) -> LibraryRow:
    """The row with the distribution that installed the library."""
    return replace(row, distribution=owner.distribution, version=owner.version)


def check_limits(
    settings: Settings,
    usage: Usage,
    libraries: Sequence[AnalyzedLibrary],
    *,
    unchecked: Sequence[str],
) -> BaselineComparison:
    """Compare a run with all limits of the settings, and with the baseline.

    Args:
        unchecked: why they check less than the settings ask for.
    """
    comparison = compare_with_baseline(libraries, settings.compare)
    rows = [library_row(one.plan) for one in libraries]
    names = [*map(names_of, libraries)]
    with_kernels = [names_of(one) for one in libraries if not one.plan.is_files]
    crossed = (
        *_crossed(settings, usage, rows, _covered(libraries)),
        *_crossed_by_library(settings, zip(names, rows, strict=True)),
        *comparison.crossed,
        *_limits_of_nothing(settings, names, with_kernels),
        *(unchecked if settings.has_limits else ()),
    )
    return comparison._replace(crossed=crossed)


def _covered(libraries: Iterable[AnalyzedLibrary]) -> tuple[LibraryCoverage, ...]:
    return tuple(one.coverage for one in libraries if one.coverage is not None)


def rows_of(libraries: Iterable[AnalyzedLibrary]) -> tuple[LibraryRow, ...]:
    """A row for each library, the most unused bytes first."""
    rows = (library_row(library.plan) for library in libraries)
    return tuple(sorted(rows, key=lambda row: (-row.unused_bytes, row.path)))


def _replay_line(usage: Usage) -> str | None:
    if usage.replay is None:
        return None
    when = time.strftime("%Y-%m-%d", time.gmtime(usage.replay.recorded_ns / 1e9))
    return (
        f"No GPU: replaying the trace recorded on {usage.replay.device}, {when}; "
        "nothing is proved here."
    )


def _not_covered(analysis: Analysis) -> Iterator[str]:
    usage = analysis.usage
    yield from dict.fromkeys(warning.text for warning in usage.incomplete)
    for process in usage.processes:
        # A child that is gone lost nothing: merging names those that did.
        if not process.ended and process.header.role.runs_tests:
            name = process.header.worker or process.header.role.value
            yield (
                f"process {process.header.pid} ({name}) did not end by itself; what it had "
                "done until then is in the trace"
            )
    yield from analysis.unreadable


def _crossed(
    settings: Settings,
    usage: Usage,
    rows: Sequence[LibraryRow],
    coverage: Sequence[LibraryCoverage],
) -> Iterator[str]:
    if settings.require_gpu and (usage.replay is not None or not usage.devices):
        yield "require_gpu: no GPU code was loaded on a GPU here"
    yield from settings.thresholds.crossed(
        gpu_code=sum(r.code_bytes for r in rows),
        unused_bytes=sum(r.unused_bytes for r in rows),
        used_kernels=sum(r.used_kernels for r in rows),
    )
    yield from settings.coverage.crossed(coverage)


def _crossed_by_library(
    settings: Settings, rows: Iterable[tuple[LibraryNames, LibraryRow]]
) -> Iterator[str]:
    limits = settings.thresholds
    for names, row in rows:
        of_library = {
            key: limit_of(getattr(limits, key).libraries, names)
            for key in limits.__struct_fields__
            if key != "min_used_kernels" or not row.is_files
        }
        for text in limits.of_library(of_library).crossed(
            gpu_code=row.code_bytes,
            unused_bytes=row.unused_bytes,
            used_kernels=row.used_kernels,
        ):
            yield f"{Path(names.path).name}: {text}"


def _limits_of_nothing(
    settings: Settings, all_names: Sequence[LibraryNames], libraries: Sequence[LibraryNames]
) -> Iterator[str]:
    """Limits whose glob matches nothing that was analysed: what checks nothing must not pass."""
    covers = ("coverage.libraries",) if settings.coverage.fail_under.overall is not None else ()
    for option in (*LIMIT_OPTIONS, *covers):
        names = libraries if option in _OF_KERNELS else all_names
        globs = globs_of(settings, option)
        matched = {glob for glob in globs if any(matches_library(glob, one) for one in names)}
        yield from unmatched_globs(settings, option, matched, library_candidates(names))
