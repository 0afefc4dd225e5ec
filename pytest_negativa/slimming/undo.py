"""The slimmed libraries of a folder, where the original of each is, and how it comes back.

The original was kept, or the library and its spare give it. The manifest lists slimmed libraries. A
library with a spare says itself what its original was, so it needs no entry.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import (
    SlimManifest,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.slimming.code_files import undo_files
from pytest_negativa.slimming.journal import Journal, open_journals
from pytest_negativa.slimming.manifest import (
    UNREADABLE,
    Fate,
    how_to_reinstall,
    is_reinstalled,
    is_result,
    is_uninstalled,
    judge,
    may_be_kept,
    spares_of,
)
from pytest_negativa.slimming.spares import clear_abandoned, find_spare, note_of, release
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
            status, after, detail = _undo_one(journal, entry, dry_run=dry_run)
        except NegativaError as e:
            status, after, detail = SlimStatus.FAILED, entry.size, str(e)
        left = status is SlimStatus.LEFT and is_past(journal.tree, entry)
        if not dry_run and (left or status is SlimStatus.UNDONE):
            journal.note_back(key, entry)
        done += entry.original_size
        on_done(done, total)
        yield SlimRow(path=key, status=status, before=entry.size, after=after, detail=detail)
    yield from undo_files(journal, dry_run=dry_run)


def _undo_one(
    journal: Journal, entry: SlimmedFile, *, dry_run: bool
) -> tuple[SlimStatus, int, str | None]:
    """Put one original back; status, bytes and detail for its row."""
    tree, found = journal.tree, judge(journal.tree, entry)
    status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
    if found[Fate.UNREADABLE]:
        # It may be the result, and its entry is the way to the original.
        raise ReconstructError(UNREADABLE)
    results = [*found[Fate.RESULT]]
    if not results:
        if found[Fate.ORIGINAL]:
            return status, entry.original_size, "it was back already"
        for reason in found[Fate.ANOTHER].values():
            return SlimStatus.LEFT, entry.size, reason
        if (reason := _why_gone(tree, entry)) is not None:
            return SlimStatus.LEFT, 0, reason
    like = tree.root / results[0] if results else None
    kept = kept_original(tree.root, entry)
    if kept is None and like is not None:
        find_spare(like)
    if not dry_run:
        # With originals, an earlier run was killed between the names of one file.
        names = [*results, *found[Fate.ORIGINAL]]
        journal.put_back(names or entry.names, entry, kept, like)
    return status, entry.original_size, None


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


# ---- The slimmed libraries that are there ----


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A slimmed library that is there.

    Attributes:
        key: of its entry.
        entry: what the manifest says, or the library itself.
        results: those of its names that lead to the result, or to what became of it.
        originals: those that lead to the original, because a run was killed between the names.
        sha256: of the file to which the first of them leads; None: it can't be read.
        is_whole: all are the result, as it was written.
    """

    key: str
    entry: SlimmedFile
    results: tuple[str, ...]
    sha256: str | None
    originals: tuple[str, ...] = ()
    is_whole: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are to lead to the same file."""
        return (*self.results, *self.originals)


def find_slimmed(
    tree: Tree, manifest: SlimManifest, lost: dict[FileGroup, str]
) -> Iterator[Slimmed]:
    """The slimmed libraries that are there: those of the manifest, then those of ``by_spare``."""
    for key, entry in manifest.slimmed.items():
        if tree.covers(entry.names) and (found := _slimmed(tree, key, entry)) is not None:
            yield found
    for group, entry in by_spare(tree, manifest, lost):
        yield Slimmed(group.name, entry, group.names, entry.sha256)


def _slimmed(tree: Tree, key: str, entry: SlimmedFile) -> Slimmed | None:
    if all(is_result(tree, name, entry) for name in entry.names):
        return Slimmed(key, entry, entry.names, entry.sha256)
    found = judge(tree, entry)
    results, originals = found[Fate.UNREADABLE] or found[Fate.RESULT], tuple(found[Fate.ORIGINAL])
    if not results:
        return None
    groups = filter(None, map(tree.group_of, results))
    digests = [tree.digest(group) for group in groups]
    is_whole = set(digests) == {entry.sha256} and not originals
    return Slimmed(key, entry, tuple(results), digests[0], originals, is_whole)


def by_spare(
    tree: Tree, manifest: SlimManifest, lost: dict[FileGroup, str]
) -> Iterator[tuple[FileGroup, SlimmedFile]]:
    """The slimmed libraries that the manifest does not name, with entries as of a manifest.

    ``lost`` gets the problem of those whose original nothing gives back.
    """
    known = {name for entry in manifest.slimmed.values() for name in entry.names}
    for group in tree.groups:
        is_library = known.isdisjoint(group.names) and tree.is_library(group)
        if is_library and tree.facts(group).is_slimmed:
            try:
                entry = _read_entry(tree, group)
            except NegativaError as e:
                lost[group] = str(e)
            else:
                yield group, entry


def _read_entry(tree: Tree, group: FileGroup) -> SlimmedFile:
    """The entry for a library with a spare, as of a manifest. It has the times of its original.

    Raises:
        ReconstructError: the library and its spare don't give the original.
    """
    path = tree.root / group.name
    detail = "was slimmed, and no manifest here has its original; install it again"
    # Another manifest is that of a folder around the file.
    for folder in path.parents:
        if folder != tree.root and (folder / MANIFEST_NAME).is_file():
            undo = f"negativa slim undo {shlex.quote(str(folder))}"
            raise ReconstructError(
                f"{detail}, or slim {folder}, which has its manifest, or run {undo}"
            )
    try:
        note, sha256 = note_of(path), tree.digest(group)
        spare = None if note is None else find_spare(path)
    except NegativaError as e:
        raise ReconstructError(f"{detail}: {str(e).removeprefix(f'{path}: ')}") from e
    if note is None or sha256 is None:
        raise ReconstructError(detail)
    found = (tree.records(name).get(record_digest(sha256)) for name in group.names)
    return SlimmedFile(
        names=group.names,
        original_sha256=note.original.hex(),
        original_size=note.original_size,
        sha256=sha256,
        size=group.size,
        mtime_ns=group.state.mtime_ns,
        recipe="",
        source="",
        gpu_code_removed=0,
        records=tuple(os.path.relpath(record, tree.root) for record in found if record),
        spare=str(spare),
    )


def kept_original(root: Path, entry: SlimmedFile) -> Path | None:
    """The file of an original that was kept; None: the library and its spare give it.

    Raises:
        ReconstructError: it is neither here nor in a spare.
    """
    kept = None if entry.original is None else Path(entry.original)
    if kept is not None and digest_of(kept) == entry.original_sha256:
        return kept
    if entry.spare is not None:
        return None
    why = "was not kept" if kept is None else f"({kept}) is gone, or no longer that file"
    raise ReconstructError(
        f"was slimmed, and its original {why}; {how_to_reinstall(entry.reinstall)}"
    )


def is_past(tree: Tree, entry: SlimmedFile) -> bool:
    """Whether an entry is of no use any more: no file needs it as the way to its original.

    The original is back, another file took its place, or the library was uninstalled. One that is
    away for a while may come back.
    """
    found = judge(tree, entry)
    may_be_result = found[Fate.RESULT] or found[Fate.UNREADABLE]
    if may_be_result or (may_be_kept(entry) and not found[Fate.ORIGINAL]):
        return False
    is_other = bool(found[Fate.ORIGINAL] or found[Fate.ANOTHER])
    return is_other or entry.spare is None or is_uninstalled(tree.root, entry)
