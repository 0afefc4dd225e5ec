"""Snapshots of what a user names: a run, a lock, a baseline, libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.images.containers import is_container
from pytest_negativa.images.contents import Question, map_archive, may_hold_code
from pytest_negativa.installed.libraries import find_libraries
from pytest_negativa.installed.sites import SITE_NAMES, Places
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.file_kinds import HEAD_SIZE, kind_of
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.report import CodeFilesRow
from pytest_negativa.models.snapshot import Snapshot
from pytest_negativa.planning.snapshot import (
    make_snapshot,
    snapshot_code_files,
    snapshot_lock,
    snapshot_map,
)
from pytest_negativa.reporting.rows import code_files_rows
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.results import load_baseline, load_files_plans, load_planned
from pytest_negativa.storage.runs import Run, RunsFolder


def load_snapshot(
    argument: str,
    runs: RunsFolder,
    *,
    headers_only: bool = False,
    cache: MapCache | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """The snapshot of a run, lock, baseline, library, folder, archive or installed distribution.

    Args:
        argument: a path, the id of a run, or the name of an installed distribution.
        runs: the folder for runs.
        headers_only: unpack nothing, so that libraries list no kernels.
        cache: of library maps.
        on_done: called with the bytes of libraries done and of all.

    Raises:
        NegativaError: it is none of these, or can't be read.
    """
    path = Path(argument)
    run = Run(runs.folder / argument if (runs.folder / argument).is_dir() else path)
    if run.plan_files():
        return snapshot_run(argument, load_planned(run), code_files_rows(load_files_plans(run)))
    if run.usage_file.exists():
        raise StoreError(run.why_unplanned())
    if is_container(path):
        return _of_archive(path, headers_only, on_done)
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(HEAD_SIZE)
        if head.startswith(b"{"):
            return load_baseline(path)
        if kind_of(head) is None:
            return snapshot_lock(load_lock(path), argument)
    return _of_libraries(argument, headers_only, cache, on_done)


def _of_libraries(
    argument: str,
    headers_only: bool,
    cache: MapCache | None,
    on_done: Callable[[int, int], None] | None,
) -> Snapshot:
    found = find_libraries(argument)
    sizes = {path: path.stat().st_size for path in found.paths}
    request = _request(headers_only)
    libraries, done, places = [], 0, Places()
    for mapped in map_libraries(tuple(sizes), request, cache):
        done += sizes[mapped.path]
        if on_done is not None:
            on_done(done, sum(sizes.values()))
        if mapped.library_map is not None and (
            _has_code(mapped.library_map) or (found.explicit and mapped.library_map.sections)
        ):
            version, place = _version_and_place(places, os.path.realpath(mapped.path))
            libraries.append(snapshot_map(mapped.library_map, None, version, place))
        elif mapped.error is not None and found.explicit:
            raise mapped.error
    if not libraries:
        raise OptionError(f"{argument}: no library with GPU code")
    return make_snapshot(found.label, libraries)


def _has_code(library_map: LibraryMap) -> bool:
    """Whether a program could load code from the file."""
    return bool(library_map.sections) and not library_map.library.file_kind.is_link_time


def _request(headers_only: bool) -> MapRequest:
    scope = Scope(headers_only=headers_only)
    return MapRequest(scope, with_map=True, with_summary=False, any_file=True)


def _of_archive(
    path: Path, headers_only: bool, on_done: Callable[[int, int], None] | None
) -> Snapshot:
    question = Question(may_hold_code, lambda size: _request(headers_only))
    contents = map_archive(path, question, on_done=on_done)
    for problem in contents.problems:
        raise problem
    version = contents.distribution[1] if contents.distribution is not None else None
    libraries = [
        snapshot_map(mapped.library_map, None, version, _below_site(name))
        for name, mapped in contents.libraries.items()
        if mapped.library_map is not None and _has_code(mapped.library_map)
    ]
    if not libraries:
        raise OptionError(f"{path}: no library with GPU code")
    return make_snapshot(path.name, libraries)


def _below_site(name: str) -> str:
    """A path in an archive from site-packages on; all of it if there is no such folder."""
    parts = name.split("/")
    below = [i + 1 for i, part in enumerate(parts) if part in SITE_NAMES]
    return "/".join(parts[below[-1] if below else 0 :])


def snapshot_run(
    title: str, planned: Sequence[AnalyzedLibrary], code_files: Sequence[CodeFilesRow]
) -> Snapshot:
    """The snapshot of a run's maps and plans."""
    places = Places()
    libraries = (
        snapshot_map(one.library_map, one.plan, *_version_and_place(places, one.plan.library.path))
        for one in planned
    )
    return make_snapshot(title, (*libraries, *snapshot_code_files(code_files)))


def _version_and_place(places: Places, path: str) -> tuple[str | None, str | None]:
    """Version of the distribution, and the path in its site or in the current folder."""
    place = places.of(path)
    if not Path(place.path).is_absolute():
        return place.version, place.path
    here = Path(os.path.realpath("."))
    below = Path(path).relative_to(here) if Path(path).is_relative_to(here) else None
    return place.version, None if below is None else below.as_posix()
