"""``negativa slim undo``: originals come back, never over an upgraded or deleted library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.code_files import removed_packages
from pytest_negativa.slimming.journal import Journal, open_journals
from pytest_negativa.slimming.manifest import is_reinstalled
from pytest_negativa.slimming.recipes import keep_whole
from pytest_negativa.slimming.request import OnProgress, SlimOptions, counter
from pytest_negativa.slimming.slim import Slimmer
from pytest_negativa.slimming.slimmed import Fate, Slimmed
from pytest_negativa.slimming.tree import Tree
from pytest_negativa.slimming.worklist import WorkList, task_of


def undo_trees(
    paths: Sequence[Path],
    *,
    dry_run: bool = False,
    on_done: OnProgress = lambda done, total: None,
) -> list[SlimRow]:
    """Put back all originals, and remove their entries from the manifest.

    An original was kept, or a library and its spare give it.

    A slimmed library that was damaged since gets its original back, too. A library that another
    file replaced, such as another version, stays as it is. If a folder fails, the others go on.

    Args:
        paths: folders that were slimmed, or libraries of them.
        dry_run: report what would be done, and write nothing.
        on_done: told of the bytes of a folder's originals that are back, and of all.

    Returns:
        A row for each entry of the manifests, and for each folder whose manifest or RECORD can't be
        read or written.

    Raises:
        NegativaError: a folder can't be read or held.
    """
    rows: list[SlimRow] = []
    with open_journals(paths, dry_run=dry_run) as journals:
        for journal in journals:
            try:
                work = _find_work(journal, SlimOptions(dry_run=dry_run))
                made = Slimmer(work).run(counter(work.size, on_done))
                rows += sorted(made, key=lambda row: row.path)
            except NegativaError as e:
                rows.append(SlimRow.unchanged(f"{journal.root}/", SlimStatus.FAILED, 0, str(e)))
    return rows


def _find_work(journal: Journal, options: SlimOptions) -> WorkList:
    work = WorkList(journal, options, by_digest=True)
    for slimmed in (*work.slimmed, *work.away):
        row = None if slimmed.results else _row_away(journal.tree, slimmed, options)
        if row is not None:
            work.rows.append(row)
            continue
        try:
            work.tasks.append(task_of(journal.tree, slimmed, keep_whole()))
        except NegativaError as e:
            work.add_unchanged(slimmed.key, SlimStatus.FAILED, slimmed.entry.size, str(e))
    for group, problem in work.lost.items():
        work.add_unchanged(group.name, SlimStatus.FAILED, group.size, problem)
    work.packages += removed_packages(journal.tree, journal.manifest).values()
    for package in work.packages:
        package.back = True
    return work


def _row_away(tree: Tree, slimmed: Slimmed, options: SlimOptions) -> SlimRow | None:
    """The row of a library that is away; None: its original comes back."""
    entry, after = slimmed.entry, 0
    status, detail = SlimStatus.LEFT, _why_gone(tree, slimmed)
    if slimmed.originals:
        status = SlimStatus.WOULD_UNDO if options.dry_run else SlimStatus.UNDONE
        detail, after = "it was back already", entry.original_size
    elif slimmed.another is not None:
        detail, after = slimmed.another.value, entry.size
    if detail is None:
        return None
    return SlimRow(path=slimmed.key, status=status, before=entry.size, after=after, detail=detail)


def _why_gone(tree: Tree, slimmed: Slimmed) -> str | None:
    """The reason to leave a deleted library away; None: its package is there."""
    entry = slimmed.entry
    if Fate.UNINSTALLED in slimmed.fates.values():
        return Fate.UNINSTALLED.value
    if any(is_reinstalled(entry, tree.records(name)) for name in entry.names):
        return "it is no longer there, and RECORD has the digest of another file"
    places = [tree.root / name for name in entry.names]
    ours = all(one.parent.is_dir() and one.parent.resolve() == one.parent for one in places)
    is_back = not ours or any(map(os.path.lexists, places)) or entry.original is None
    return Fate.GONE.value if is_back else None
