"""Plans of files that are GPU code themselves: unopened ones are unused. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.code_files import WatchedFiles, map_files
from pytest_negativa.models.plan import (
    Decision,
    KeepReason,
    LibraryPlan,
    UnusedReason,
)
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.settings.globs import LibraryNames, first_glob, is_selected


def plan_files(
    watched: Sequence[WatchedFiles],
    usage: Usage,
    settings: Settings,
    incomplete: str | None,
    loaded: Collection[str],
) -> Iterator[AnalyzedLibrary]:
    """Decide about the files of each distribution: a file that no process opened is unused.

    A distribution of which the settings select no file gets no plan.

    Args:
        watched: what the run's watch saw.
        usage: what the run's processes loaded, from these folders or from others.
        settings: what is to be kept.
        incomplete: why the run may need more than it opened; None if not.
        loaded: RECORD's digest field of each image in memory, and of each file with images.
    """
    paths = {used.library.path for used in usage.libraries if used.images}
    # A lock can't tell two folders with the same files apart.
    opened: defaultdict[str, set[str]] = defaultdict(set)
    for one in watched:
        opened[one.digest].update(one.opened)
    for one in watched:
        names = {name: names_of_file(one, name) for name in one.files}
        if not any(is_selected(settings.libraries, found) for found in names.values()):
            continue
        reason = incomplete
        if one.unseen is not None:
            reason = f"nothing tells what else was opened: {one.unseen}"
        kept = {
            name: KeepReason.LOADED
            if name in opened[one.digest]
            else KeepReason.MEMORY_IMAGE
            if one.files[name][0] in loaded or found.path in paths
            else KeepReason.INCOMPLETE
            if reason is not None
            else _policy(settings, found)
            for name, found in names.items()
        }
        sizes = {name: size for name, (_, size) in one.files.items()}
        library_map = map_files(one.site, one.distribution, one.digest, sizes)
        plan = LibraryPlan(
            library=library_map.library,
            devices=tuple(dict.fromkeys(d.compute_capability for d in usage.devices)),
            decisions=tuple(
                Decision(
                    *file.payload,
                    (stays := kept[name := str(file.identifier)]) is not None,
                    (stays or UnusedReason.NOT_OPENED).value,
                    name,
                )
                for file in library_map.iter_frames()
            ),
            used_kernels=(),
            unused_kernels=(),
            notes=() if reason is None else (f"all files are kept: {reason}",),
        )
        yield AnalyzedLibrary(library_map, plan, distribution=one.distribution, version=one.version)


def names_of_file(watched: WatchedFiles, name: str) -> LibraryNames:
    """The names of a file that globs on libraries are compared with."""
    return LibraryNames(f"{watched.site}/{name}", None, watched.distribution)


def _policy(settings: Settings, names: LibraryNames) -> KeepReason | None:
    """The reason that the settings keep a file."""
    if settings.keep.archs:
        # Nothing tells what the GPUs of other machines need.
        return KeepReason.ARCH_POLICY
    is_kept = first_glob(settings.keep.libraries, names) is not None
    is_left_out = not is_selected(settings.libraries, names)
    return KeepReason.LIBRARY_POLICY if is_kept or is_left_out else None


def unite(runs: Sequence[Sequence[WatchedFiles]]) -> tuple[WatchedFiles, ...]:
    """The files that several runs together opened of the distributions that all watched."""
    found = []
    for one in runs[0] if runs else ():
        # A run may have the distribution in two folders, and open files of either.
        same = [[two for two in run if _key(two) == _key(one)] for run in runs]
        if not all(same):
            continue
        known = [two for run in same for two in run]
        files = {name: file for two in known for name, file in two.files.items()}
        found.append(
            replace(
                one,
                files=dict(sorted(files.items())),
                opened=tuple(sorted({name for two in known for name in two.opened})),
                unseen=next((two.unseen for two in known if two.unseen is not None), None),
            )
        )
    return tuple(found)


def _key(one: WatchedFiles) -> tuple[str, str, str]:
    return one.distribution, one.version, one.digest
