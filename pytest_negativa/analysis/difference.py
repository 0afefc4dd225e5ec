"""Sides of ``negativa diff``: libraries, runs, baselines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_negativa.analysis.inspect import inspect_libraries
from pytest_negativa.errors import FormatError, NegativaError, OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest
from pytest_negativa.images.archive_kinds import count_archives
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.difference import Side, SideLibrary
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.planning.difference import side_of_map, side_of_report
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.results import load_baseline
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.storage.system import read_head


def load_side(
    argument: str,
    runs: RunsFolder,
    *,
    headers_only: bool = False,
    cache: MapCache | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Side:
    """The libraries of a run, baseline, library, folder, archive or installed distribution.

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
    if run.usage_file.exists():
        # What reports take is not needed for libraries: 10 ms.
        from pytest_negativa.analysis.report import load_contents

        contents = load_contents(run)
        if not contents.libraries:
            raise StoreError(run.why_unplanned())
        # "latest" leads to another run tomorrow.
        return Side(_with_run(argument, run.folder.resolve().name), side_of_report(contents.report))
    if path.is_file() and read_head(path).startswith(b"{"):
        baseline = load_baseline(path)
        return Side(_with_run(argument, baseline.run_id), side_of_report(baseline))
    return _read(argument, headers_only, cache, on_done)


def _with_run(argument: str, run_id: str) -> str:
    """The user's argument, with the id of its run."""
    return argument if run_id in argument else f"{argument} (run {run_id})"


def _read(
    argument: str,
    headers_only: bool,
    cache: MapCache | None,
    on_done: Callable[[int, int], None] | None,
) -> Side:
    """A library, or the libraries in a folder, an archive or a distribution."""
    libraries: list[SideLibrary] = []
    link_time: list[SideLibrary] = []

    def take(mapped: MappedLibrary) -> MappedLibrary:
        library_map = mapped.library_map
        if library_map is not None and library_map.sections:
            is_link_time = library_map.library.file_kind.is_link_time
            (link_time if is_link_time else libraries).append(_side_of(mapped, library_map))
        # All maps of a folder may not fit in memory.
        return mapped._replace(library_map=None, error=_why_unread(mapped))

    scope = Scope(headers_only=headers_only, calls=headers_only)
    request = MapRequest(scope, with_map=True, with_summary=False, slimmed=True, any_file=True)
    [found] = inspect_libraries((argument,), request, cache, None, on_done, take)
    if found.libraries.explicit:
        # Else no program loads code from a file for linkers.
        libraries += link_time
    unread = [*found.libraries.unlisted, *(one.error for one in found.mapped if one.error)]
    if not libraries and unread:
        raise unread[0]
    if not libraries:
        raise OptionError(f"{argument}: no library with GPU code{_unopened(Path(argument))}")
    owners, wheel = Owners(), found.libraries.distribution
    versions = (
        owners.of(one.path).version if wheel is None else wheel.partition(" ")[2]
        for one in libraries
    )
    return Side(
        found.libraries.label,
        tuple(
            one._replace(version=version or None)
            for one, version in zip(libraries, versions, strict=True)
        ),
        tuple(unread),
    )


def _side_of(mapped: MappedLibrary, library_map: LibraryMap) -> SideLibrary:
    """A file as its map tells, a slimmed library with the bytes that are left in it."""
    one = side_of_map(library_map)._replace(path=str(mapped.path))
    if mapped.removed is None or one.code == mapped.removed.stored_bytes:
        return one
    # Kernels went from cubins that stay. The map doesn't tell how many bytes of each arch went.
    return one._replace(code=mapped.removed.stored_bytes, archs=None)


def _unopened(path: Path) -> str:
    """A hint at archives in a folder, which are not opened."""
    count = count_archives(path) if path.is_dir() else 0
    were = format_items(count, "archive was", "archives were")
    return f"; {were} not opened: name them" if count else ""


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
