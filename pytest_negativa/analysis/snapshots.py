"""Snapshots of what a user names: a run, a lock, a baseline, libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.errors import FormatError, NegativaError, OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest, map_libraries
from pytest_negativa.images.archive_kinds import count_archives
from pytest_negativa.images.layers import is_container
from pytest_negativa.images.tree import Question, may_hold_code, read_tree
from pytest_negativa.installed.libraries import find_libraries, size_of
from pytest_negativa.installed.sites import SITE_NAMES, Places
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.file_kinds import kind_of
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
    if is_container(path):
        return _snapshot(argument, _read_archive(path, headers_only, on_done), on_unread)
    if path.is_file():
        head = read_head(path)
        if head.startswith(b"{"):
            found = load_baseline(path)
            return replace(found, title=_with_run(argument, found.title))
        if kind_of(head) is None:
            return snapshot_lock(load_lock(path), argument)
    return _snapshot(argument, _read_files(argument, headers_only, cache, on_done), on_unread)


def _with_run(argument: str, run_id: str) -> str:
    """What the user named, with the run that it is of."""
    return argument if run_id in argument else f"{argument} (run {run_id})"


class _Found(NamedTuple):
    """The libraries of a folder or an archive, and why others can't be read."""

    title: str
    libraries: list[SnapshotLibrary]
    unread: list[NegativaError]


def _snapshot(argument: str, found: _Found, on_unread: Callable[[NegativaError], None]) -> Snapshot:
    for problem in found.unread:
        on_unread(problem)
    if not found.libraries and found.unread:
        raise FormatError(argument, None, "no library with GPU code can be read")
    if not found.libraries:
        raise OptionError(f"{argument}: no library with GPU code{_unopened(Path(argument))}")
    return make_snapshot(found.title, found.libraries)


def _unopened(path: Path) -> str:
    """A hint at archives in a folder, which are not opened."""
    count = count_archives(path) if path.is_dir() else 0
    were = format_items(count, "archive was", "archives were")
    return f"; {were} not opened: name them" if count else ""


def _read_files(
    argument: str,
    headers_only: bool,
    cache: MapCache | None,
    on_done: Callable[[int, int], None] | None,
) -> _Found:
    found = find_libraries(argument)
    unread: list[NegativaError] = [*found.unlisted]
    sizes = {path: size_of(path) for path in found.paths}
    root = Path(argument).resolve() if Path(argument).is_dir() else None
    libraries, done, places = [], 0, Places()
    for mapped in map_libraries(tuple(sizes), _request(headers_only), cache):
        done += sizes[mapped.path]
        if on_done is not None:
            on_done(done, sum(sizes.values()))
        if (problem := _why_unread(mapped)) is not None:
            if found.explicit:
                raise problem
            unread.append(problem)
        elif mapped.library_map is not None and (
            _has_code(mapped.library_map) or (found.explicit and mapped.library_map.sections)
        ):
            path = os.path.realpath(mapped.path)
            place = places.from_folder(path, Path.cwd())
            one = _snapshot_file(mapped.library_map, mapped, place.version, _place_here(place))
            if not (found.explicit or mapped.library_map.library.file_kind.is_host):
                one = fold_file(one, place.distribution or _folder_of(path, root, place))
            libraries.append(one)
    return _Found(found.label, libraries, unread)


def _snapshot_file(
    library_map: LibraryMap, mapped: MappedLibrary, version: str | None, place: str | None
) -> SnapshotLibrary:
    """A file as its map tells, a slimmed library with the bytes that are left in it."""
    one = snapshot_map(library_map, None, version, place)
    if mapped.removed is None or one.code_bytes == mapped.removed.stored_bytes:
        return one
    # Kernels went from cubins that stay. The map doesn't tell how many bytes of each arch went.
    elements = sum(row.elements for row in one.rows)
    left = SnapshotRow(None, None, False, elements, mapped.removed.stored_bytes)
    return replace(one, rows=(left,))


def _folder_of(path: str, root: Path | None, place: Place) -> str:
    """The folder of a file below the named one, or else below its site."""
    is_below = root is not None and Path(path).is_relative_to(root)
    below = Path(path).relative_to(root) if root is not None and is_below else Path(place.path)
    return below.parent.as_posix()


def _why_unread(mapped: MappedLibrary) -> NegativaError | None:
    """Why a file could not be read, or why none of its GPU code could."""
    found = mapped.library_map
    if (
        found is not None
        and found.problems
        and not (found.sections or found.library.file_kind.is_link_time)
    ):
        first = found.problems[0]
        return FormatError(mapped.path, first.offset, first.text)
    return mapped.error


def _has_code(library_map: LibraryMap) -> bool:
    """Whether a program could load code from the file."""
    return bool(library_map.sections) and not library_map.library.file_kind.is_link_time


def _request(headers_only: bool) -> MapRequest:
    scope = Scope(headers_only=headers_only, calls=headers_only)
    return MapRequest(scope, with_map=True, with_summary=False, slimmed=True, any_file=True)


def _read_archive(
    path: Path, headers_only: bool, on_done: Callable[[int, int], None] | None
) -> _Found:
    question = Question(may_hold_code, lambda size: _request(headers_only))
    tree = read_tree(path, question, on_done=on_done)
    unread: list[NegativaError] = [*tree.problems]
    name, version = tree.distribution or (None, None)
    libraries = []
    for file, mapped in tree.libraries.items():
        if (problem := _why_unread(mapped)) is not None:
            unread.append(problem)
        elif mapped.library_map is not None and _has_code(mapped.library_map):
            place = below_site(file)
            one = _snapshot_file(mapped.library_map, mapped, version, place)
            if not mapped.library_map.library.file_kind.is_host:
                one = fold_file(one, name or PurePosixPath(place).parent.as_posix())
            libraries.append(one)
    return _Found(path.name, libraries, unread)


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
