"""The files of a run that are GPU code themselves: from what was opened to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.installed.code_files import find_code_distributions
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.code_files import (
    CODE_FILES_VERSION,
    FilesPlan,
    OpenedFiles,
    WatchedFiles,
)
from pytest_negativa.models.lock import LockedFiles
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.code_files import plan_files, unite
from pytest_negativa.storage.atomic import remove_file
from pytest_negativa.storage.results import load_opened, save_files_plans, save_opened
from pytest_negativa.storage.runs import Run


def watched_files(run: Run) -> tuple[WatchedFiles, ...]:
    """What the watch of a run saw, by distribution; empty if nothing was watched.

    Raises:
        StoreError: it can't be read.
    """
    opened = load_opened(run)
    return () if opened is None else opened.distributions


def plan_code_files(
    run: Run,
    watched: Iterable[WatchedFiles],
    usage: Usage,
    settings: Settings,
    *,
    with_plans: bool,
) -> tuple[FilesPlan, ...]:
    """Plan the files of a run, and write the plan.

    Args:
        watched: see ``watched_files``.
        with_plans: False for a run that must not feed a plan.

    Raises:
        StoreError: the plan can't be written.
    """
    remove_file(run.files_plan_file)
    incomplete = _why_incomplete(usage)
    plans = tuple(plan_files(watched, usage, settings, incomplete, _loaded(usage)))
    if with_plans and plans:
        save_files_plans(run, plans)
    return plans


def _loaded(usage: Usage) -> set[str]:
    """RECORD's digest field of each image in memory, and of each file with images."""
    digests: set[str | None] = {i.sha256 for i in (*usage.memory_images, *usage.compiled)}
    # The file may lie in another environment, which nothing watched.
    digests |= {used.library.sha256 for used in usage.libraries if used.images}
    return {record_digest(sha256) for sha256 in digests if sha256 is not None}


def widen_files(
    locked: Iterable[LockedFiles],
    usage: Usage,
    opened: Iterable[WatchedFiles],
    folders: Iterable[str],
) -> Iterator[LockedFiles]:
    """Keep the files that other runs used, too.

    A distribution gets no row if nothing tells which of its files they used. All of them stay then.

    Args:
        locked: the files that a lock has.
        usage: of the other runs.
        opened: what those of them opened that watched it; samples don't.
        folders: where the distributions are installed, such as ``sys.path``.
    """
    if _why_incomplete(usage) is not None:
        return
    loaded = _loaded(usage)
    paths = {used.library.path for used in usage.libraries if used.images}
    here = {one.digest: one for one in find_code_distributions(folders)}
    watched = tuple(opened)
    for one in locked:
        installed = here.get(one.record_sha256)
        same = [two for two in watched if two.digest == one.record_sha256]
        if installed is None or any(two.unseen is not None for two in same):
            continue
        used = {name for two in same for name in two.opened}
        more = {
            name: int(row.size)
            for name, row in installed.rows.items()
            if name not in one.kept
            and (name in used or row.digest in loaded or f"{installed.site}/{name}" in paths)
        }
        yield replace(
            one,
            kept=tuple(sorted((*one.kept, *more))),
            kept_files=one.kept_files + len(more),
            unused_bytes=max(one.unused_bytes - sum(more.values()), 0),
        )


def _why_incomplete(usage: Usage) -> str | None:
    """Why the run may need files that it did not open; None if it doesn't."""
    return next((warning.text for warning in usage.incomplete), usage.why_unended())


def combine_opened(run: Run, parts: Sequence[Run]) -> None:
    """Note in a run what any of its parts opened. If one did not watch, all files stay.

    Raises:
        StoreError: a part's note can't be read, or the run's can't be written.
    """
    found = [opened for part in parts if (opened := load_opened(part)) is not None]
    if len(found) == len(parts) and found:
        distributions = unite([opened.distributions for opened in found])
        opened = OpenedFiles(format_version=CODE_FILES_VERSION, distributions=distributions)
        save_opened(run, opened)
