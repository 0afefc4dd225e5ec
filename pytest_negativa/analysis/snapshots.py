"""Snapshots of what a user names: a run, a lock, a baseline, libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from pytest_negativa.analysis.inspect import inspect_libraries
from pytest_negativa.errors import FormatError, NegativaError, OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest
from pytest_negativa.images.containers import count_archives, is_container
from pytest_negativa.installed.sites import SITE_NAMES, Places
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.file_kinds import FileKind, kind_of
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import Place
from pytest_negativa.models.snapshot import Snapshot, SnapshotLibrary, SnapshotRow
from pytest_negativa.planning.snapshot import (
    fold_file,
    make_snapshot,
    snapshot_lock,
    snapshot_map,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.results import load_baseline, load_planned
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.system import read_head


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
    is_explicit, root, places = found.libraries.explicit, Path(argument).resolve(), Places()
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
            where = places.from_folder(real, Path.cwd())
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
        first = found.problems[0]
        return FormatError(mapped.path, first.offset, first.text)
    return mapped.error


def below_site(name: str) -> str:
    """The part of a path below ``site-packages``; all of it if there is no such folder."""
    parts = name.split("/")
    below = [i + 1 for i, part in enumerate(parts) if part in SITE_NAMES]
    return "/".join(parts[below[-1] if below else 0 :])


def snapshot_run(title: str, planned: Sequence[AnalyzedLibrary]) -> Snapshot:
    """The snapshot of a run's maps and plans."""
    places = Places()
    libraries = []
    for one in planned:
        place = places.from_folder(one.plan.library.path, Path.cwd())
        found = snapshot_map(one.library_map, one.plan, place.version, _place_here(place))
        libraries.append(found)
    return make_snapshot(title, libraries)


def _place_here(place: Place) -> str | None:
    """The path of a library in its site or in the current folder; None if it lies elsewhere."""
    return None if Path(place.path).is_absolute() else place.path
