"""A lock of a run, what it leaves out; one that misses or other runs widened."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze, loaded_digests
from pytest_negativa.analysis.misses import libraries_in, open_original
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import (
    FormatError,
    NotElfError,
    ReconstructError,
    StoreError,
)
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import map_library, read_library
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.owners import Owners
from pytest_negativa.installed.sites import find_code_distributions
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.library import LibraryIdentity, LibraryMap, Scope
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary, seal
from pytest_negativa.models.plan import KeepReason, LibraryPlan, may_be
from pytest_negativa.models.settings import Granularity, Settings
from pytest_negativa.models.spans import (
    PAGE_SIZE,
    around,
    covers,
    minus,
    pages_in_words,
    round_up,
    size,
)
from pytest_negativa.models.trace import CHILDREN_UNTRACED, Role, TracedLibrary, Usage
from pytest_negativa.pages.gather import gather, unite
from pytest_negativa.pages.misses import Misses
from pytest_negativa.planning.keep_needed import keeps_more
from pytest_negativa.planning.lock import (
    make_lock,
    plan_from_lock,
    widen_library,
    with_pages,
)
from pytest_negativa.reporting.next_command import next_command
from pytest_negativa.reporting.units import format_items
from pytest_negativa.slimming.tree import soname_of
from pytest_negativa.storage.results import (
    load_opened,
    load_planned,
    load_usage,
    load_verdict,
)
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_when_ended


def lock_run(run: Run, settings: Settings, *, unproved: bool) -> Lock:
    """The lock of a run.

    Args:
        unproved: see ``make_lock``.

    Raises:
        ReconstructError: nothing is proved, and ``unproved`` is not set.
        StoreError: the run can't be read.
    """
    host, verdict = gather(run), load_verdict(run)
    planned = load_planned(run) if host is None or run.plan_files() else ()
    unplanned, incomplete = _find_unplanned(load_usage(run), [one.plan.library for one in planned])
    for lack in () if host is None else host.incomplete[:1]:
        if not planned:
            raise StoreError(f"{run}: not locked: {lack}; trace again")
        unplanned.append(LeftOut(path="CPU code", reason=f"{lack}; trace again"))
    try:
        return make_lock(
            run.run_id if verdict is None else verdict.run_id,
            planned,
            verdict,
            partial(Owners().from_folder, folder=Path.cwd()),
            touched=None if host is None or host.incomplete else host,
            unplanned=unplanned,
            # Of a run that traced CPU code alone, nothing of GPU code is locked.
            incomplete=incomplete if planned else (),
            unproved=unproved or not planned,
            include=settings.libraries.include,
            exclude=(*settings.libraries.exclude, *settings.keep.libraries),
        )
    except ReconstructError as e:
        ways = f"{next_command(run)}, or negativa lock --unproved"
        raise ReconstructError(f"{e}; next: {ways}") from e


def _find_unplanned(
    usage: Usage | None, planned: Collection[LibraryIdentity]
) -> tuple[list[LeftOut], tuple[str, ...]]:
    """The other libraries of a run that have, or may have, GPU code; and why there may be more.

    Args:
        usage: of the run, if it is known.
        planned: the libraries that are in its plan.
    """
    if usage is None:
        return [], ("the run has no usage.json, which tells what it loaded",)
    paths = {library.path for library in planned}
    others = dict.fromkeys(
        used.library.path
        for used in usage.libraries
        if used.library.path not in paths and not _is_planned_copy(used.library, planned)
    )
    found = ((path, _why_unplanned(Path(path))) for path in others)
    unplanned = [
        LeftOut(path=path, soname=soname_of(Path(path)), reason=reason)
        for path, reason in found
        if reason is not None
    ]
    # The plan is complete without the children, for its proof ran them, too.
    children = [w for w in usage.warnings if w.code == CHILDREN_UNTRACED]
    return unplanned, tuple(dict.fromkeys(lack.text for lack in (*usage.incomplete, *children)))


def _is_planned_copy(traced: TracedLibrary, planned: Collection[LibraryIdentity]) -> bool:
    """Whether a file that is gone was a copy of a planned library, which has its uses."""
    is_known = traced.sha256 is not None or traced.build_id is not None
    is_gone = not Path(traced.path).exists()
    return is_gone and is_known and any(may_be(traced, library) for library in planned)


def _why_unplanned(path: Path) -> str | None:
    """The reason that nothing was planned for a library with GPU code; None for one without."""
    if not path.is_file():
        return "it is gone since the run" if ".so" in path.name else None
    if is_slimmed(path):
        return "it is slimmed already"
    try:
        library_map = read_library(path, Scope(headers_only=True))
    except NotElfError:
        return None
    except FormatError as e:
        return f"it cannot be read: {e.problem}"
    return (
        "not looked at, by libraries.include or libraries.exclude" if library_map.sections else None
    )


_USED = "used outside of the run that was proved"


Added: TypeAlias = dict[tuple[str, str], int | None]
"""By path and kind (``element``, ``page``, ``file``): how many of them a library or a distribution
keeps more, or more of; None: all, as nothing tells which."""


def widen_lock(lock: Lock, logs: Sequence[Misses], places: Sequence[Path]) -> tuple[Lock, Added]:
    """A sealed lock that keeps the GPU code and the pages that came back, and what it keeps more.

    Of a library that the lock doesn't have, all pages left but for those that came back.

    Args:
        lock: what was proved.
        logs: by original.
        places: folders with the libraries, slimmed or not, or libraries.

    Raises:
        NegativaError: the original of a library is not there, or does not fit the lock.
    """
    missed = {misses.original.hex(): misses for misses in logs if misses.pages}
    known = {row.sha256 for row in lock.libraries}
    new = (_never_loaded(misses) for digest, misses in missed.items() if digest not in known)
    lock = replace(lock, libraries=(*lock.libraries, *new))
    libraries = libraries_in(places, {misses.name for misses in missed.values()})
    rows = (
        _widen(row, missed[row.sha256], libraries) if row.sha256 in missed else row
        for row in lock.libraries
    )
    return _widened(lock, replace(lock, libraries=tuple(rows)))


def _never_loaded(misses: Misses) -> LockedLibrary:
    """The row of a library that came back in part, as if nothing of it had."""
    return LockedLibrary(
        path=misses.name,
        sha256=misses.original.hex(),
        size=misses.original_size,
        pages=pages_in_words([(0, round_up(misses.original_size, PAGE_SIZE))]),
        loaded=False,
    )


def _widened(before: Lock, after: Lock) -> tuple[Lock, Added]:
    now = {row.sha256: row for row in (*after.libraries, *after.files)}
    added: Added = {}
    for what, rows in (("element", before.libraries), ("file", before.files)):
        for old in rows:
            new = now.get(old.sha256)
            added[old.path, what] = None if new is None else len({*new.kept} - {*old.kept})
            pages = 0 if new is None else (size(old.spans) - size(new.spans)) // PAGE_SIZE
            added[old.path, "page"] = pages
    return seal(after), {key: count for key, count in added.items() if count != 0}


def widen_by_use(lock: Lock, runs: Sequence[Run], settings: Settings) -> tuple[Lock, Added]:
    """A sealed lock that keeps what other runs used, such as samples of a service; what is added.

    Args:
        lock: what was proved.
        runs: what their traces may lack keeps GPU code, except that samples lack anything.
        settings: what to keep besides, and where maps are cached.

    Raises:
        NegativaError: a library of the lock was used and is not here, or does not fit the lock; or
            the lock has CPU code, and a run's trace of it is not complete.
    """
    more, touched = lock, unite([u for run in runs if (u := gather(run)) is not None])
    if lock.has_pages and touched.incomplete:
        which = ", ".join(touched.processes)
        raise StoreError(f"{which}: not added to the lock: {touched.incomplete[0]}; trace again")
    place_of = partial(Owners().from_folder, folder=Path.cwd())
    # A lock without a trace of CPU code takes none of it.
    if lock.has_pages:
        more = replace(lock, libraries=with_pages(lock.libraries, touched, place_of))
    runs = [run for run in runs if run.trace_files() or not run.has_pages]
    traces = [trace for run in runs for trace in run.require_traces()]
    if not traces:
        return _widened(lock, more)
    usage = merge_when_ended(lambda: traces)
    opened = [files for run in runs for files in load_opened(run)]
    children = (
        replace(process, header=replace(process.header, role=Role.CHILD))
        if process.header.role is Role.SAMPLE
        else process
        for process in usage.processes
    )
    # All that is not kept by use would be unused by the samples; no plan is made of that.
    usage = replace(usage, processes=tuple(children))
    settings = replace(settings, granularity=Granularity.KERNEL)
    plans = [one.plan for one in analyze(usage, settings).libraries]
    _require_here(lock, usage, {plan.library.path for plan in plans})
    used = {plan.library.sha256: plan for plan in plans}
    rows = (
        _widen_by_plan(row, used[row.sha256]) if row.code_sha256 and row.sha256 in used else row
        for row in more.libraries
    )
    files = tuple(widen_files(lock.files, usage, opened, sys.path))
    return _widened(lock, replace(more, libraries=tuple(rows), files=files))


def widen_files(
    locked: Iterable[LockedLibrary],
    usage: Usage,
    opened: Collection[WatchedFiles],
    folders: Iterable[str],
) -> Iterator[LockedLibrary]:
    """Keep the files that other runs used, too.

    A distribution gets no row if nothing tells which of its files they used. All of them stay then.

    Args:
        locked: the files that a lock has.
        usage: of the other runs.
        opened: what those of them opened that watched it; samples don't.
        folders: where the distributions are installed, such as ``sys.path``.
    """
    if usage.why_incomplete() is not None:
        return
    loaded = loaded_digests(usage)
    paths = {used.library.path for used in usage.libraries if used.images}
    here = {one.code_digest: one for one in find_code_distributions(folders)}
    for one in locked:
        installed = here.get(one.sha256)
        same = [two for two in opened if two.digest == one.sha256]
        if installed is None or any(two.unseen is not None for two in same):
            continue
        used = {name for two in same for name in two.opened}
        used |= {
            name
            for name, row in installed.code_files.items()
            if row.digest in loaded or f"{installed.site}/{name}" in paths
        }
        files = installed.map_code_files()
        missed = {f.payload.start: f.identifier or "" for f in files.iter_frames()
                  if f.identifier in used}  # fmt: skip
        yield widen_library(one, files, missed, KeepReason.LOADED)


def _require_here(lock: Lock, usage: Usage, here: Collection[str]) -> None:
    """Refuse if a library that the lock may have was used and can't be read here.

    Raises:
        StoreError: there is one.
    """
    for used in usage.libraries:
        library = used.library
        may_be = (
            library.sha256 in {row.sha256 for row in lock.gpu_libraries}
            if library.sha256 is not None
            else library.size in {row.size for row in lock.gpu_libraries}
        )
        if used.images and may_be and library.path not in here:
            raise StoreError(
                f"{library.path}: is used, and is not here as it was; negativa combine --path "
                "tells where libraries of other machines are"
            )


def _widen_by_plan(locked: LockedLibrary, plan: LibraryPlan) -> LockedLibrary:
    with ByteSource(plan.library.path) as source:
        library_map = _map_of(locked, source, plan.library.path)
    more = keeps_more(plan, plan_from_lock(locked, library_map))
    used = dict.fromkeys(more, _USED)
    return widen_library(locked, library_map, used, KeepReason.LOADED, more)


def _map_of(locked: LockedLibrary, source: ByteSource, path: str) -> LibraryMap:
    """The map of a lock's library, with the code that must be unpacked to apply the lock.

    Args:
        source: the library, whose digest was compared.
        path: of the library.
    """
    unpacked = frozenset(c.offset for c in locked.kept if c.functions is not None)
    scope = Scope(starts=unpacked) if unpacked else Scope(headers_only=True)
    library_map = map_library(source, read_host_elf(source), scope)
    library = replace(library_map.library, path=path, sha256=locked.sha256)
    return replace(library_map, library=library)


def _widen(locked: LockedLibrary, misses: Misses, libraries: Sequence[Path]) -> LockedLibrary:
    locked = replace(locked, pages=pages_in_words(minus(locked.spans, misses.ranges())))
    if locked.code_sha256 is None:
        return locked
    with open_original(misses, libraries) as (path, source):
        # A wrong header would hide code that came back.
        if source.sha256() != locked.sha256:
            raise ReconstructError(
                f"{path}: with its spare it does not give the original back: one of the two is "
                "damaged; see negativa slim check"
            )
        library_map = _map_of(locked, source, str(path))
    devices = [*map(ComputeCapability.parse, locked.devices)]
    return widen_library(locked, library_map, missed_code(misses, library_map, devices))


def missed_code(
    misses: Misses, library_map: LibraryMap, devices: Collection[ComputeCapability]
) -> dict[int, str]:
    """GPU code that came back: how often, for people, by start of the payload or frame.

    The driver reads the headers of all elements of a region, and headers share pages with
    payloads. So a page counts for a payload if it lies within it, or if the payload was touched
    first on it. Else it counts if a device would load the element.

    Args:
        misses: of the library.
        library_map: of the original.
        devices: those of the lock.
    """
    loaded = library_map.loaded_starts(devices)
    found = {}
    for block in library_map.iter_code():
        pages = [
            miss
            for start, end in around([block.payload], PAGE_SIZE)
            for page in range(start, end, PAGE_SIZE)
            if (miss := misses.pages.get(page // PAGE_SIZE)) is not None
            and (
                block.payload.start in loaded
                or block.payload.start <= miss.first < block.payload.end
                or covers([block.payload], page, page + PAGE_SIZE)
            )
        ]
        if pages:
            times = max(miss.times for miss in pages)
            found[block.payload.start] = (
                f"it came back {format_items(times, 'time', 'times')}"
                if times
                else "it came back beside other code"
            )
    return found
