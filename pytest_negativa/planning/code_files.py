"""Which files of a distribution that are GPU code nothing needs. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.code_files import NOT_SELECTED, FilesPlan, WatchedFiles
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.settings.globs import LibraryNames, is_selected, matches_library

_OPENED = "opened"
_LOADED = "loaded from memory or by its path"


def plan_files(
    watched: Iterable[WatchedFiles],
    usage: Usage,
    settings: Settings,
    incomplete: str | None,
    loaded: Collection[str],
) -> Iterator[FilesPlan]:
    """Decide about the files of each distribution: a file that no process opened is unused.

    Args:
        watched: what the run's watch saw.
        usage: what the run's processes loaded, from these folders or from others.
        settings: what is to be kept.
        incomplete: why the run may need more than it opened; None if not.
        loaded: RECORD's digest field of each image in memory, and of each file with images.
    """
    paths = {used.library.path for used in usage.libraries if used.images}
    for one in watched:
        reason = incomplete
        if one.unseen is not None:
            reason = f"nothing tells what else was opened: {one.unseen}"
        kept: dict[str, str] = {}
        opened = set(one.opened)
        for name, file in one.files.items():
            found = reason
            names = names_of_file(one, name)
            if not is_selected(settings.libraries, names):
                found = NOT_SELECTED
            elif name in opened:
                found = _OPENED
            elif file.digest in loaded or names.path in paths:
                found = _LOADED
            elif found is None:
                found = _policy(settings, names)
            if found is not None:
                kept[name] = found
        yield FilesPlan(
            distribution=one.distribution,
            version=one.version,
            site=one.site,
            digest=one.digest,
            kept=kept,
            kept_bytes=sum(one.files[name].size for name in kept),
            unused={name: f.size for name, f in one.files.items() if name not in kept},
            reason=reason,
        )


def names_of_file(watched: WatchedFiles, name: str) -> LibraryNames:
    """The names of a file that globs on libraries are compared with."""
    return LibraryNames(f"{watched.site}/{name}", None, watched.distribution)


def _policy(settings: Settings, names: LibraryNames) -> str | None:
    """Why the settings keep a file."""
    if settings.keep.archs:
        return f"keep.archs: nothing tells what GPUs of {', '.join(settings.keep.archs)} need"
    globs = (glob for glob in settings.keep.libraries if matches_library(glob, names))
    glob = next(globs, None)
    return None if glob is None else f"keep.libraries: {glob}"


def unite(runs: Sequence[Sequence[WatchedFiles]]) -> tuple[WatchedFiles, ...]:
    """What several runs together opened of the distributions that all of them watched."""
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
