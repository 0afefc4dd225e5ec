"""A run against its baseline: what to say of the growth, and which limits it crossed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.analysis.snapshots import snapshot_run
from pytest_negativa.errors import NegativaError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.settings import Compare, GrowthLimit
from pytest_negativa.models.snapshot import Change, LibraryChange, Snapshot
from pytest_negativa.planning.snapshot import (
    compare_snapshots,
    name_of,
    pair,
    short_names,
)
from pytest_negativa.reporting.units import format_bytes, format_growth, format_items, format_names
from pytest_negativa.settings.globs import LibraryNames, limit_of
from pytest_negativa.storage.results import load_baseline
from pytest_negativa.storage.urls import place_of

_UNLISTED = ": the baseline lists no kernels of it, so new ones are unknown; write it anew"
_UNTESTED = "new-kernels-untested"
_MOST_LINES = 10


class BaselineComparison(NamedTuple):
    """Growth of a run, for a report.

    Attributes:
        lines: the growth in total, and the largest changes of libraries.
        crossed: limits that were crossed.
    """

    lines: tuple[str, ...] = ()
    crossed: tuple[str, ...] = ()


def make_baseline(run_id: str, libraries: Sequence[AnalyzedLibrary]) -> Snapshot:
    """The file that a project commits: figures, and the names of its own libraries' kernels."""
    covered = zip(_names_in(libraries), libraries, strict=True)
    own = {name for name, one in covered if one.coverage is not None}
    found = snapshot_run(run_id, libraries)
    return replace(
        found,
        libraries=tuple(
            replace(one, kernels=one.kernels if one.name in own else None, used_kernels=None)
            for one in found.libraries
        ),
    )


def compare_with_baseline(
    libraries: Sequence[AnalyzedLibrary], settings: Compare
) -> BaselineComparison:
    """Compare a run with the baseline, if there is one.

    A baseline that can't be read counts as a crossed limit: a gate must not open by itself.
    """
    if settings.baseline is None:
        return BaselineComparison()
    try:
        before = load_baseline(place_of(settings.baseline))
    except NegativaError as e:
        return BaselineComparison(crossed=(f"compare.baseline: {e}",))
    return compare_figures(before, libraries, settings)


def compare_figures(
    before: Snapshot,
    libraries: Sequence[AnalyzedLibrary],
    settings: Compare,
) -> BaselineComparison:
    """Compare a run with a baseline that was read."""
    after = snapshot_run("this run", libraries)
    difference = compare_snapshots(before, after)
    changes = difference.libraries
    names = dict(zip(_names_in(libraries), libraries, strict=True))
    # Kernels that the baseline doesn't list are not new for that.
    unlisted = [
        one.name
        for one in pair(before, after).libraries
        if one.kernels is None and one.name in names and names[one.name].coverage is not None
    ]
    appeared = {one.library: one.appeared for one in difference.kernels}
    untested = {
        name: [k.name for k in one.coverage.kernels if not k.is_run and k.name in appeared[name]]
        for name, one in names.items()
        if one.coverage is not None and name in appeared
    }
    total = _total(changes)
    all_untested = [name for found in untested.values() for name in found]
    crossed = [*_crossed("compare.fail", settings.fail.overall or (), total, all_untested)]
    for_globs = {name: names_of(one) for name, one in names.items()}
    for change in changes:
        if change.name in for_globs:
            limits = limit_of(settings.fail.libraries, for_globs[change.name]) or ()
            where = f"{change.name}: compare.fail"
            crossed += _crossed(where, limits, change, untested.get(change.name, []))
    lines = [*_lines(total, changes, all_untested), *(f"{name}{_UNLISTED}" for name in unlisted)]
    return BaselineComparison(tuple(lines), tuple(crossed))


def names_of(library: AnalyzedLibrary) -> LibraryNames:
    """The names of a library that globs are compared with."""
    found = library.plan.library
    return LibraryNames(found.path, found.soname, library.distribution)


def _names_in(libraries: Sequence[AnalyzedLibrary]) -> tuple[str, ...]:
    """The names that libraries have in a snapshot."""
    return short_names(name_of(one.plan.library) for one in libraries)


def _total(changes: Iterable[LibraryChange]) -> LibraryChange:
    found = tuple(changes)
    return LibraryChange(
        name="all libraries",
        versions=(None, None),
        code=Change.total(one.code for one in found),
        unused=Change.total(one.unused for one in found),
        size=Change.total(one.size for one in found),
    )


def _crossed(
    where: str, limits: Iterable[GrowthLimit], change: LibraryChange, untested: Sequence[str]
) -> Iterator[str]:
    figures = {"size": change.size, "code": change.code, "unused": change.unused}
    for limit in limits:
        if limit.figure == _UNTESTED:
            if len(untested) > limit.limit:
                count = format_items(len(untested), "new kernel is", "new kernels are")
                named = format_names(untested)
                yield f"{where}: {count} untested ({named}), the limit is {limit.limit:.0f}"
            continue
        figure = figures[limit.figure]
        before = figure.before or 0
        allowed = before * limit.limit / 100 if limit.is_percent else limit.limit
        if figure.growth > allowed:
            most = f"{limit.limit:g}%" if limit.is_percent else format_bytes(int(limit.limit))
            yield f"{where}: {limit.figure} grew: {_describe(figure)}, the limit is {most}"


def _lines(
    total: LibraryChange, changes: Sequence[LibraryChange], untested: Sequence[str]
) -> Iterator[str]:
    yield f"GPU code {_describe(total.code)}, unused {_describe(total.unused)}"
    changed = [one for one in changes if one.code.growth or one.unused.growth]
    for one in changed[:_MOST_LINES]:
        yield f"{one.name}: GPU code {_describe(one.code)}, unused {_describe(one.unused)}"
    if len(changed) > _MOST_LINES:
        yield f"{len(changed) - _MOST_LINES:,} more libraries changed"
    if untested:
        yield f"{format_items(len(untested), 'new kernel', 'new kernels')} without a test"


def _describe(change: Change) -> str:
    if change.before is None:
        return f"appeared with {format_bytes(change.after or 0)}"
    if change.after is None:
        return f"went, {format_bytes(change.before)}"
    return (
        f"{format_bytes(change.before)} -> {format_bytes(change.after)} "
        f"({format_growth(change.before, change.after)})"
    )
