"""Puts originals back: those that were kept, and those that a library and its spare give."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import (
    RecordRow,
    SlimManifest,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.slimming.code_files import undo_files
from pytest_negativa.slimming.folder_locks import hold
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.manifest import (
    UNREADABLE,
    Fate,
    Judgement,
    Records,
    folders_of_spares,
    how_to_reinstall,
    is_reinstalled,
    is_uninstalled,
    judge,
    may_be_kept,
    other_manifest,
)
from pytest_negativa.slimming.replace import link
from pytest_negativa.slimming.slim import roots_of, scan_held
from pytest_negativa.slimming.spares import clear_abandoned, disown, find_spare, note_of
from pytest_negativa.slimming.tree import FileGroup, Tree, digest_of
from pytest_negativa.spare.note import Note

OnSpares: TypeAlias = Callable[[AbstractSet[Path]], None]
"""Is told the folders whose spares gave originals back."""


def undo_trees(
    paths: Sequence[Path],
    *,
    dry_run: bool = False,
    on_spares: OnSpares = lambda folders: None,
) -> list[SlimRow]:
    """Put back all originals, and remove their entries from the manifest.

    An original was kept, or a library and its spare give it.

    A slimmed library that was damaged since gets its original back, too. A library that another
    file replaced, such as another version, stays as it is.

    Args:
        paths: folders that were slimmed, or libraries of them.
        dry_run: report what would be done, and write nothing.
        on_spares: is called after a folder was put back, unless ``dry_run``.

    Returns:
        A row for each entry of the manifests.

    Raises:
        NegativaError: a folder, manifest or RECORD can't be read or written.
    """
    with hold(*roots_of(paths)):
        trees = scan_held(paths, dry_run=dry_run)
        return [row for tree in trees for row in _undo_tree(tree, on_spares, dry_run=dry_run)]


def _undo_tree(tree: Tree, on_spares: OnSpares, *, dry_run: bool) -> list[SlimRow]:
    journal = Journal(tree)
    manifest = journal.manifest
    entries = {k: e for k, e in sorted(manifest.slimmed.items()) if tree.covers(e.names)}
    rows = [*tree.unlisted_rows(), *tree.unnamed_rows(is_slimmed)]
    by_spare = dict(_entries_by_spare(tree, manifest, rows))
    entries |= by_spare
    if dry_run or not (entries or manifest.removed or manifest.run):
        return [*rows, *_undo_entries(journal, entries, dry_run=True)]
    killed = {Path(folder) for folder in manifest.run_spares}
    try:
        with journal.at_work():
            try:
                rows += _undo_entries(journal, entries, dry_run=False)
            finally:
                journal.finish({})
                journal.restore_times()
                if not manifest.slimmed:
                    manifest.left.clear()
                    manifest.records.clear()
                for spares in killed:
                    clear_abandoned(spares)
    finally:
        # Without their entries nothing tells whether more libraries have spares there.
        needed = folders_of_spares((*manifest.slimmed.values(), *by_spare.values()))
        free = (folders_of_spares(entries.values()) | killed) - needed
        for spares in free:
            disown(spares, tree.root)
        on_spares(free)
    return rows


def _undo_entries(
    journal: Journal, entries: Mapping[str, SlimmedFile], *, dry_run: bool
) -> Iterator[SlimRow]:
    for key, entry in entries.items():
        try:
            row = _undo_one(journal, key, entry, dry_run=dry_run)
        except NegativaError as e:
            row = _row(key, entry, SlimStatus.FAILED, entry.size, str(e))
        if not dry_run and _is_done_with(journal.tree, row, entry):
            journal.note_back(key, entry)
        yield row
    yield from undo_files(journal, dry_run=dry_run)


def _entries_by_spare(
    tree: Tree, manifest: SlimManifest, rows: list[SlimRow]
) -> Iterator[tuple[str, SlimmedFile]]:
    """Entries for the slimmed libraries that no manifest names, if their spares are in reach.

    ``rows`` gets a row for each other one.
    """
    known = {name for entry in manifest.slimmed.values() for name in entry.names}
    for group in tree.groups:
        path = tree.root / group.name
        if not (known.isdisjoint(group.names) and tree.is_library(group) and is_slimmed(path)):
            continue
        detail = "was slimmed, and no manifest here tells how to undo it; install it again"
        if (folder := other_manifest(tree.root, path)) is not None:
            detail += f", or run negativa slim undo {shlex.quote(str(folder))}"
        else:
            try:
                if (note := note_of(path)) is not None:
                    yield group.name, _entry_of(tree, group, note, find_spare(path))
                    continue
            except NegativaError as e:
                detail += f": {str(e).removeprefix(f'{path}: ')}"
        rows.append(SlimRow.unchanged(group.name, SlimStatus.FAILED, group.size, detail))


def _entry_of(tree: Tree, group: FileGroup, note: Note, spare: Path) -> SlimmedFile:
    """What a manifest would say of a library with a spare. It has the times of its original."""
    sha256 = tree.digest(group)
    assert sha256 is not None, "its note was read"
    original = note.original.hex()
    found = tree.recorded(set(group.names))
    rows = tuple(
        RecordRow(
            record=os.path.relpath(found[name][line], tree.root),
            name=name,
            digest=record_digest(original),
            size=str(note.original_size),
        )
        for name in group.names
        if (line := record_digest(sha256)) in found.get(name, {})
    )
    return SlimmedFile(
        names=group.names,
        original_sha256=original,
        original_size=note.original_size,
        sha256=sha256,
        size=group.size,
        mtime_ns=group.mtime_ns,
        recipe="",
        source="",
        gpu_code_removed=0,
        rows=rows,
        spare=str(spare),
    )


def is_forgotten(tree: Tree, key: str, entry: SlimmedFile) -> bool:
    """Whether undo would find that an entry's library was uninstalled, or is another one now."""
    try:
        row = _way_back(tree, key, entry, judge(tree, entry))
    except NegativaError:
        return False
    return (
        isinstance(row, SlimRow)
        and row.status is SlimStatus.LEFT
        and _is_done_with(tree, row, entry)
    )


def _is_done_with(tree: Tree, row: SlimRow, entry: SlimmedFile) -> bool:
    if row.status is SlimStatus.LEFT:
        # If the library comes back, its entry is the way to the original.
        is_away = row.after == 0 and not _is_removed(tree, entry)
        return not may_be_kept(entry) and not (is_away and entry.spare is not None)
    return row.status is not SlimStatus.FAILED


def _is_removed(tree: Tree, entry: SlimmedFile) -> bool:
    """Whether a library that is not there was uninstalled, and not away with all of its site."""
    records_then = (os.path.normpath(tree.root / row.record) for row in entry.rows)
    sites = {tree.root, *(site.folder for site in tree.sites)}
    return (
        any(is_uninstalled(name, entry, records) for name, records in _recorded(tree, entry))
        and {Path(record).parents[1] for record in records_then} <= sites
        and tree.unread_record() is None
    )


def _recorded(tree: Tree, entry: SlimmedFile) -> list[tuple[str, Records]]:
    recorded = tree.recorded(set(entry.names))
    return [(name, recorded.get(name, {})) for name in entry.names]


class _Way(NamedTuple):
    """The names that get the original of a library, and the original; see ``put_back``."""

    names: list[str]
    aside: Path | None
    like: Path | None


def _undo_one(journal: Journal, key: str, entry: SlimmedFile, *, dry_run: bool) -> SlimRow:
    tree, found = journal.tree, judge(journal.tree, entry)
    way = _way_back(tree, key, entry, found)
    if isinstance(way, SlimRow):
        is_back = dry_run and way.status is SlimStatus.UNDONE
        return replace(way, status=SlimStatus.WOULD_UNDO) if is_back else way
    if dry_run:
        return _row(key, entry, SlimStatus.WOULD_UNDO, entry.original_size, None)
    journal.put_back(way.names, entry, way.aside, way.like)
    # An earlier run was killed between the names of one file.
    behind = (name for name, one in found.items() if one.fate is Fate.ORIGINAL)
    for place, state in journal.places(behind).items():
        try:
            link(tree.root / way.names[0], place, state, journal.token)
        except OSError as e:
            raise ReconstructError(f"{place}: cannot be put back: {e.strerror}") from e
    return _row(key, entry, SlimStatus.UNDONE, entry.original_size, None)


def _way_back(
    tree: Tree, key: str, entry: SlimmedFile, found: Mapping[str, Judgement]
) -> _Way | SlimRow:
    """The way to the original of a library; a row if nothing is to be put back."""
    fates = {one.fate for one in found.values()}
    if Fate.UNREADABLE in fates:
        # It may be the result, and its entry is the way to the original.
        raise ReconstructError(UNREADABLE)
    if names := [name for name, one in found.items() if one.fate is Fate.RESULT]:
        like = tree.root / names[0]
        if entry.spare is None or may_be_kept(entry):
            return _Way(names, _kept_original(like, entry), like)
        find_spare(like)
        return _Way(names, None, like)
    if Fate.ORIGINAL in fates:
        return _row(key, entry, SlimStatus.UNDONE, entry.original_size, "it was back already")
    if fates != {Fate.GONE}:
        reason = next(one.reason for one in found.values() if one.fate is Fate.ANOTHER)
        return _row(key, entry, SlimStatus.LEFT, entry.size, reason)
    if (reason := _why_gone(tree, entry)) is not None:
        return _row(key, entry, SlimStatus.LEFT, 0, reason)
    return _Way([*entry.names], _kept_original(tree.root / entry.names[0], entry), None)


def _why_gone(tree: Tree, entry: SlimmedFile) -> str | None:
    """Why a library that was deleted is not put back; None: its package is there."""
    if tree.is_hidden(entry.names):
        raise ReconstructError("its folder cannot be listed")
    recorded = _recorded(tree, entry)
    if any(is_uninstalled(name, entry, records) for name, records in recorded):
        return "it is no longer there, and its distribution is no longer installed"
    if any(is_reinstalled(name, entry, records) for name, records in recorded):
        return "it is no longer there, and RECORD has the digest of another file"
    names = [tree.root / name for name in entry.names]
    ours = all(
        not os.path.lexists(name) and name.parent.is_dir() and name.parent.resolve() == name.parent
        for name in names
    )
    return None if entry.original is not None and ours else "it is no longer there"


def _kept_original(place: Path, entry: SlimmedFile) -> Path:
    if entry.original is None:
        raise ReconstructError(
            f"its original was not kept; {how_to_reinstall(place, entry.origin)}"
        )
    aside = Path(entry.original)
    if digest_of(aside) != entry.original_sha256:
        raise ReconstructError(
            f"{aside} is gone, or no longer its original; {how_to_reinstall(place, entry.origin)}"
        )
    return aside


def _row(
    key: str, entry: SlimmedFile, status: SlimStatus, after: int, detail: str | None
) -> SlimRow:
    return SlimRow(path=key, status=status, before=entry.size, after=after, detail=detail)
