"""The files of a run that are GPU code themselves: what was opened of them, and loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from pytest_negativa.installed.code_files import find_code_distributions
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.code_files import unite
from pytest_negativa.planning.lock import widen_library
from pytest_negativa.storage.results import load_opened, save_opened
from pytest_negativa.storage.runs import Run


def loaded_digests(usage: Usage) -> set[str]:
    """RECORD's digest field of each image in memory, and of each file with images."""
    digests: set[str | None] = {i.sha256 for i in (*usage.memory_images, *usage.compiled)}
    # The file may lie in another environment, which nothing watched.
    digests |= {used.library.sha256 for used in usage.libraries if used.images}
    return {record_digest(sha256) for sha256 in digests if sha256 is not None}


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
    here = {one.digest: one for one in find_code_distributions(folders)}
    for one in locked:
        installed = here.get(one.sha256)
        same = [two for two in opened if two.digest == one.sha256]
        if installed is None or any(two.unseen is not None for two in same):
            continue
        used = {name for two in same for name in two.opened}
        used |= {
            name
            for name, row in installed.rows.items()
            if row.digest in loaded or f"{installed.site}/{name}" in paths
        }
        files = installed.map()
        missed = {f.payload.start: f.identifier or "" for f in files.iter_frames()
                  if f.identifier in used}  # fmt: skip
        yield widen_library(one, files, missed, KeepReason.LOADED)


def combine_opened(run: Run, parts: Sequence[Run]) -> None:
    """Note in a run what any of its parts opened. If one did not watch, all files stay.

    Raises:
        StoreError: a part's note can't be read, or the run's can't be written.
    """
    found = [load_opened(part) for part in parts]
    if found and all(found):
        save_opened(run, unite(found))
