"""Snapshots of libraries, runs, locks; the baseline and the growth that crosses a limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.analysis.inspect import inspect_libraries
from pytest_negativa.errors import FormatError, NegativaError, OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest
from pytest_negativa.images.archive_kinds import count_archives
from pytest_negativa.images.layers import is_container
from pytest_negativa.installed.owners import Owners
from pytest_negativa.installed.sites import SITE_NAMES
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.file_kinds import FileKind, kind_of
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import Place
from pytest_negativa.models.settings import Compare, GrowthLimit
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.snapshot import (
    Change,
    LibraryChange,
    Snapshot,
    SnapshotLibrary,
    SnapshotRow,
)
from pytest_negativa.planning.snapshot import (
    compare_snapshots,
    fold_file,
    make_snapshot,
    name_of,
    short_names,
    snapshot_lock,
    snapshot_map,
    with_names_of,
)
from pytest_negativa.reporting.difference import describe_change
from pytest_negativa.reporting.units import and_more, format_items, format_names
from pytest_negativa.settings.globs import limit_of, names_of
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.results import load_baseline, load_planned
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.system import read_head
from pytest_negativa.storage.urls import place_of


def load_snapshot(
    argument: str,
    runs: RunsFolder,
    *,
    on_unread: Callable[[NegativaError], None],
    headers_only: bool = False,
    cache: MapCache | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """The snapshot of a run, lock, baseline, library, folder, archive or installed distribution.

    Args:
        argument: a path, the id of a run, or the name of an installed distribution.
        runs: the folder for runs.
        on_unread: called for each file or folder that the snapshot lacks, as it can't be read.
        headers_only: unpack nothing, so that libraries list no kernels.
        cache: of library maps.
        on_done: called with the bytes of libraries done and of all.

    Raises:
        NegativaError: it is none of these, or can't be read.
    """
    path = Path(argument)
    run = Run(runs.folder / argument if (runs.folder / argument).is_dir() else path)
    if run.plan_files():
        # "latest" leads to another run tomorrow.
        title = _with_run(argument, run.folder.resolve().name)
        return snapshot_run(title, load_planned(run))
    if run.usage_file.exists():
        raise StoreError(run.why_unplanned())
    if path.is_file() and not is_container(path):
        head = read_head(path)
        if head.startswith(b"{"):
            found = load_baseline(path)
            return replace(found, title=_with_run(argument, found.title))
        if kind_of(head) is None:
            return snapshot_lock(load_lock(path), argument)
    return _read(argument, headers_only, cache, on_done, on_unread)


def _with_run(argument: str, run_id: str) -> str:
    """The user's argument, with the id of its run."""
    return argument if run_id in argument else f"{argument} (run {run_id})"


def _read(
    argument: str,
    headers_only: bool,
    cache: MapCache | None,
    on_done: Callable[[int, int], None] | None,
    on_unread: Callable[[NegativaError], None],
) -> Snapshot:
    """The snapshot of a library, or of the libraries in a folder, an archive or a distribution."""
    kept: dict[Path, tuple[SnapshotLibrary, FileKind]] = {}

    def take(mapped: MappedLibrary) -> MappedLibrary:
        library_map = mapped.library_map
        if library_map is not None and library_map.sections:
            kept[mapped.path] = _snapshot_file(library_map, mapped), library_map.library.file_kind
        # All maps of a folder may not fit in memory.
        return mapped._replace(library_map=None, error=_why_unread(mapped))

    scope = Scope(headers_only=headers_only, calls=headers_only)
    request = MapRequest(scope, with_map=True, with_summary=False, slimmed=True, any_file=True)
    [found] = inspect_libraries((argument,), request, cache, None, on_done, take)
    is_explicit, root, owners = found.libraries.explicit, Path(argument).resolve(), Owners()
    libraries: list[SnapshotLibrary] = []
    unread = [*found.libraries.unlisted, *(one.error for one in found.mapped if one.error)]
    for problem in unread:
        if is_explicit:
            raise problem
        on_unread(problem)
    for path, (one, kind) in sorted(kept.items()):
        # No program loads code from a file for linkers.
        if kind.is_link_time and not is_explicit:
            continue
        if is_container(root):
            name, _, version = (found.libraries.distribution or "").partition(" ")
            place: str | None = below_site(path.relative_to(root).as_posix())
            holder = name or PurePosixPath(place or "").parent.as_posix()
        else:
            real = os.path.realpath(path)
            where = owners.from_folder(real, Path.cwd())
            place, version = _place_here(where), where.version or ""
            holder = where.distribution or _folder_of(real, root, where)
        one = replace(one, place=place, version=version or None)
        libraries.append(one if is_explicit or kind.is_host else fold_file(one, holder))
    if not libraries and unread:
        raise FormatError(argument, None, "no library with GPU code can be read")
    if not libraries:
        raise OptionError(f"{argument}: no library with GPU code{_unopened(Path(argument))}")
    title = root.name if is_container(root) else found.libraries.label
    return make_snapshot(title, libraries)


def _unopened(path: Path) -> str:
    """A hint at archives in a folder, which are not opened."""
    count = count_archives(path) if path.is_dir() else 0
    were = format_items(count, "archive was", "archives were")
    return f"; {were} not opened: name them" if count else ""


def _snapshot_file(library_map: LibraryMap, mapped: MappedLibrary) -> SnapshotLibrary:
    """A file as its map tells, a slimmed library with the bytes that are left in it."""
    one = snapshot_map(library_map)
    if mapped.removed is None or one.code_bytes == mapped.removed.stored_bytes:
        return one
    # Kernels went from cubins that stay. The map doesn't tell how many bytes of each arch went.
    elements = sum(row.elements for row in one.rows)
    left = SnapshotRow(None, None, False, elements, mapped.removed.stored_bytes)
    return replace(one, rows=(left,))


def _folder_of(path: str, root: Path, place: Place) -> str:
    """The folder of a file below the named one, or else below its site."""
    is_below = Path(path).is_relative_to(root)
    below = Path(path).relative_to(root) if is_below else Path(place.path)
    return below.parent.as_posix()


def _why_unread(mapped: MappedLibrary) -> NegativaError | None:
    """The error of a file that could not be read, or whose GPU code could not."""
    found = mapped.library_map
    if (
        found is not None
        and found.problems
        and not (found.sections or found.library.file_kind.is_link_time)
    ):
        return FormatError(mapped.path, None, found.problems[0])
    return mapped.error


def below_site(name: str) -> str:
    """The part of a path below ``site-packages``; all of it if there is no such folder."""
    parts = name.split("/")
    below = [i + 1 for i, part in enumerate(parts) if part in SITE_NAMES]
    return "/".join(parts[below[-1] if below else 0 :])


def snapshot_run(title: str, planned: Sequence[AnalyzedLibrary]) -> Snapshot:
    """The snapshot of a run's maps and plans."""
    owners = Owners()
    libraries = []
    for one in planned:
        place = owners.from_folder(one.plan.library.path, Path.cwd())
        found = snapshot_map(one.library_map, one.plan, place.version, _place_here(place))
        libraries.append(found)
    return make_snapshot(title, libraries)


def _place_here(place: Place) -> str | None:
    """The path of a library in its site or in the current folder; None if it lies elsewhere."""
    return None if Path(place.path).is_absolute() else place.path


_UNLISTED = ": the baseline lists no kernels of it, so new ones are unknown; write it anew"
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
        for one in with_names_of(before, after).libraries
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
    for_globs = {name: names_of(one.plan.library, one.distribution) for name, one in names.items()}
    for change in changes:
        if change.name in for_globs:
            limits = limit_of(settings.fail.libraries, for_globs[change.name]) or ()
            where = f"{change.name}: compare.fail"
            crossed += _crossed(where, limits, change, untested.get(change.name, []))
    lines = [*_lines(total, changes, all_untested), *(f"{name}{_UNLISTED}" for name in unlisted)]
    return BaselineComparison(tuple(lines), tuple(crossed))


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
    total: LibraryChange, changes: Sequence[LibraryChange], untested: Sequence[str]
) -> Iterator[str]:
    yield f"GPU code {_describe(total.code)}, unused {_describe(total.unused)}"
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
