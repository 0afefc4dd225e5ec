"""Puts originals back: those that were kept, and those that a library and its spare give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.models.slimming import (
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.slimming.code_files import undo_files
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.manifest import (
    UNREADABLE,
    Fate,
    is_reinstalled,
    is_uninstalled,
    judge,
    spares_of,
)
from pytest_negativa.slimming.originals import by_spare, is_past, kept_original
from pytest_negativa.slimming.scan import open_journals
from pytest_negativa.slimming.spares import clear_abandoned, find_spare, release
from pytest_negativa.slimming.tree import MANIFEST_NAME, FileGroup, Tree


def undo_trees(
    paths: Sequence[Path],
    *,
    dry_run: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
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
                rows += _undo_tree(journal, on_done, dry_run=dry_run)
            except NegativaError as e:
                rows.append(SlimRow.unchanged(f"{journal.root}/", SlimStatus.FAILED, 0, str(e)))
    return rows


def _undo_tree(
    journal: Journal, on_done: Callable[[int, int], None], *, dry_run: bool
) -> list[SlimRow]:
    tree, manifest = journal.tree, journal.manifest
    entries = {k: e for k, e in sorted(manifest.slimmed.items()) if tree.covers(e.names)}
    lost: dict[FileGroup, str] = {}
    entries |= (unlisted := {group.name: one for group, one in by_spare(tree, manifest, lost)})
    rows = [SlimRow.unchanged(group.name, SlimStatus.FAILED, group.size, problem)
            for group, problem in lost.items()]  # fmt: skip
    if dry_run or not (entries or (tree.root / MANIFEST_NAME).is_file()):
        return [*rows, *_undo_entries(journal, entries, on_done, dry_run=True)]
    before = clear_abandoned(manifest)
    with journal.at_work(before):
        try:
            rows += _undo_entries(journal, entries, on_done, dry_run=False)
        finally:
            journal.finish()
        left = {row.path for row in rows if row.status is SlimStatus.FAILED}
        before |= spares_of(entry for key, entry in unlisted.items() if key not in left)
        release(before, tree.root, manifest)
    return rows


def _undo_entries(
    journal: Journal,
    entries: Mapping[str, SlimmedFile],
    on_done: Callable[[int, int], None],
    *,
    dry_run: bool,
) -> Iterator[SlimRow]:
    done, total = 0, sum(entry.original_size for entry in entries.values())
    on_done(done, total)
    for key, entry in entries.items():
        try:
            row = _undo_one(journal, key, entry, dry_run=dry_run)
        except NegativaError as e:
            row = _row(key, entry, SlimStatus.FAILED, entry.size, str(e))
        left = row.status is SlimStatus.LEFT and is_past(journal.tree, entry)
        if not dry_run and (left or row.status is SlimStatus.UNDONE):
            journal.note_back(key, entry)
        done += entry.original_size
        on_done(done, total)
        yield row
    yield from undo_files(journal, dry_run=dry_run)


def _undo_one(journal: Journal, key: str, entry: SlimmedFile, *, dry_run: bool) -> SlimRow:
    tree, found = journal.tree, judge(journal.tree, entry)
    status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
    if found[Fate.UNREADABLE]:
        # It may be the result, and its entry is the way to the original.
        raise ReconstructError(UNREADABLE)
    results = [*found[Fate.RESULT]]
    if not results:
        if found[Fate.ORIGINAL]:
            return _row(key, entry, status, entry.original_size, "it was back already")
        for reason in found[Fate.ANOTHER].values():
            return _row(key, entry, SlimStatus.LEFT, entry.size, reason)
        if (reason := _why_gone(tree, entry)) is not None:
            return _row(key, entry, SlimStatus.LEFT, 0, reason)
    like = tree.root / results[0] if results else None
    kept = kept_original(tree.root, entry)
    if kept is None and like is not None:
        find_spare(like)
    if not dry_run:
        # With originals, an earlier run was killed between the names of one file.
        names = [*results, *found[Fate.ORIGINAL]]
        journal.put_back(names or entry.names, entry, kept, like)
    return _row(key, entry, status, entry.original_size, None)


def _why_gone(tree: Tree, entry: SlimmedFile) -> str | None:
    """The reason to leave a deleted library away; None: its package is there."""
    if is_uninstalled(tree.root, entry):
        return "it is no longer there, and its distribution is no longer installed"
    if any(is_reinstalled(entry, tree.records(name)) for name in entry.names):
        return "it is no longer there, and RECORD has the digest of another file"
    places = [tree.root / name for name in entry.names]
    ours = all(one.parent.is_dir() and one.parent.resolve() == one.parent for one in places)
    is_back = not ours or any(map(os.path.lexists, places)) or entry.original is None
    return "it is no longer there" if is_back else None


def _row(
    key: str, entry: SlimmedFile, status: SlimStatus, after: int, detail: str | None
) -> SlimRow:
    return SlimRow(path=key, status=status, before=entry.size, after=after, detail=detail)
