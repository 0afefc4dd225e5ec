"""Puts originals back: those that were kept, and those that a library and its spare give."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeAlias

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.record import RecordLine, record_digest
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.slimming import (
    RecordRow,
    SlimManifest,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.slimming.code_files import undo_files
from pytest_negativa.slimming.folder_locks import hold
from pytest_negativa.slimming.identity import (
    UNREADABLE,
    Records,
    is_reinstalled,
    is_uninstalled,
    why_another,
)
from pytest_negativa.slimming.manifest import (
    begin_run,
    digest_of,
    end_run,
    folders_of_spares,
    how_to_reinstall,
    is_original,
    load_manifest,
    may_be_kept,
    other_manifest,
    save_manifest,
    token_of,
)
from pytest_negativa.slimming.put_back import lines_before, put_back
from pytest_negativa.slimming.replace import link
from pytest_negativa.slimming.slim import roots_of, scan_held
from pytest_negativa.slimming.slimmer import write_records
from pytest_negativa.slimming.spares import (
    clear_abandoned,
    disown,
    find_spare,
    note_of,
)
from pytest_negativa.slimming.tree import FileGroup, Tree
from pytest_negativa.spare.note import Note
from pytest_negativa.storage.attributes import set_mtime
from pytest_negativa.storage.system import open_regular

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
        paths: folders that were slimmed, or libraries of them; if empty, the packages of the
            interpreter that runs.
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
    manifest = load_manifest(tree.root)
    token = token_of(manifest)
    entries = {k: e for k, e in sorted(manifest.slimmed.items()) if tree.covers(e.names)}
    records = tree.recorded({name for entry in entries.values() for name in entry.names})
    rows = [*tree.unlisted_rows(), *tree.unnamed_rows(is_slimmed)]
    by_spare = dict(_entries_by_spare(tree, manifest, rows))
    entries |= by_spare
    if not dry_run and (entries or manifest.removed or manifest.run):
        manifest = begin_run(tree.root, manifest, token)
    # By RECORD, because two distributions may each have a line for one file.
    lines: defaultdict[str, dict[str, RecordLine]] = defaultdict(dict)
    run: str | None = None
    try:
        for key, entry in entries.items():
            try:
                row = _undo_one(tree, key, entry, records, token, dry_run=dry_run)
            except NegativaError as e:
                row = _row(key, entry, SlimStatus.FAILED, entry.size, str(e))
            rows.append(row)
            if row.status is SlimStatus.UNDONE:
                for record, path, line in lines_before(tree.root, entry):
                    lines[record][path] = line
            if not dry_run and _is_done_with(tree, row, entry, records):
                manifest.slimmed.pop(key, None)
        rows += undo_files(tree, manifest, token, dry_run=dry_run)
    except KeyboardInterrupt:
        # A hidden name may be left, which the next run removes.
        run = manifest.run
        raise
    finally:
        if manifest.run and not dry_run:
            # RECORD first: after a run that was killed in between, the next finds the entries.
            sites = [Site(site) for site in tree.sites]
            write_records([tree.root], sites, lambda record: lines.get(str(record), {}), token)
            _restore_times(tree.root, manifest, sites)
            if not manifest.slimmed:
                manifest.left.clear()
                manifest.records.clear()
            killed = {Path(folder) for folder in manifest.run_spares}
            for spares in killed:
                clear_abandoned(spares)
            save_manifest(tree.root, end_run(manifest, run), token)
            # Without their entries nothing tells whether more libraries have spares there.
            needed = folders_of_spares((*manifest.slimmed.values(), *by_spare.values()))
            free = (folders_of_spares(entries.values()) | killed) - needed
            for spares in free:
                disown(spares, tree.root)
            on_spares(free)
    return rows


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
    with ByteSource(tree.root / group.name) as source:
        sha256 = source.sha256()
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


def _restore_times(root: Path, manifest: SlimManifest, sites: Sequence[Site]) -> None:
    """Give RECORD files that are as before slimming the times of then, and no other file."""
    times = {os.path.normpath(root / name): before for name, before in manifest.records.items()}
    for path in (installed.record for site in sites for installed in site.installed()):
        before = times.get(str(path))
        if before is not None and digest_of(path) == before.sha256:
            # It may belong to another user, who only let it be written.
            with contextlib.suppress(OSError), open_regular(path, follow=False) as file:
                set_mtime(file.fileno(), before.mtime_ns)


def is_forgotten(tree: Tree, key: str, entry: SlimmedFile) -> bool:
    """Whether undo would find that an entry's library was uninstalled, or is another one now."""
    records = tree.recorded(set(entry.names))
    try:
        row = _undo_one(tree, key, entry, records, "", dry_run=True)
    except NegativaError:
        return False
    return row.status is SlimStatus.LEFT and _is_done_with(tree, row, entry, records)


def _is_done_with(
    tree: Tree, row: SlimRow, entry: SlimmedFile, records: Mapping[str, Records]
) -> bool:
    if row.status is SlimStatus.LEFT:
        # If the library comes back, its entry is the way to the original.
        is_away = row.after == 0 and not _is_removed(tree, entry, records)
        return not may_be_kept(entry) and not (is_away and entry.spare is not None)
    return row.status is not SlimStatus.FAILED


def _is_removed(tree: Tree, entry: SlimmedFile, records: Mapping[str, Records]) -> bool:
    """Whether a library that is not there was uninstalled, and not away with all of its site."""
    records_then = (os.path.normpath(tree.root / row.record) for row in entry.rows)
    return (
        any(is_uninstalled(name, entry, records.get(name, {})) for name in entry.names)
        and {Path(record).parents[1] for record in records_then} <= {tree.root, *tree.sites}
        and tree.unread_record() is None
    )


def _undo_one(
    tree: Tree,
    key: str,
    entry: SlimmedFile,
    records: Mapping[str, Records],
    token: str,
    *,
    dry_run: bool,
) -> SlimRow:
    others = {
        name: _why_another(tree.root / name, name, entry, records.get(name, {}))
        for name in entry.names
        if tree.group_of(name) is not None and not is_original(tree, name, entry)
    }
    if UNREADABLE in others.values():
        # It may be the result, and its entry is the way to the original.
        raise ReconstructError(UNREADABLE)
    results = [name for name, reason in others.items() if reason is None]
    if not results:
        if any(is_original(tree, name, entry) for name in entry.names):
            status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
            return _row(key, entry, status, entry.original_size, "it was back already")
        if all(tree.group_of(name) is None for name in entry.names):
            return _undo_gone(tree, key, entry, records, token, dry_run=dry_run)
        return _row(key, entry, SlimStatus.LEFT, entry.size, next(iter(others.values())))
    aside = _original_of(tree.root / results[0], entry)
    if not dry_run:
        places = {tree.root / name: _state(tree, name) for name in results}
        put_back(aside, places, entry, token, like=tree.root / results[0])
        for name in entry.names:
            # An earlier run was killed between the names of one file.
            if name not in results and is_original(tree, name, entry):
                try:
                    link(tree.root / results[0], tree.root / name, _state(tree, name), token)
                except OSError as e:
                    raise ReconstructError(f"{name}: cannot be put back: {e.strerror}") from e
    status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
    return _row(key, entry, status, entry.original_size, None)


def _why_another(path: Path, name: str, entry: SlimmedFile, records: Records) -> str | None:
    # By digest: some tools give all files the same time, so time and size tell nothing.
    return None if digest_of(path) == entry.sha256 else why_another(path, name, entry, records)


def _undo_gone(
    tree: Tree,
    key: str,
    entry: SlimmedFile,
    records: Mapping[str, Records],
    token: str,
    *,
    dry_run: bool,
) -> SlimRow:
    """Put back a library that was deleted, unless its package was removed."""
    if tree.is_hidden(entry.names):
        raise ReconstructError("its folder cannot be listed")
    if any(is_uninstalled(name, entry, records.get(name, {})) for name in entry.names):
        detail = "it is no longer there, and its distribution is no longer installed"
        return _row(key, entry, SlimStatus.LEFT, 0, detail)
    if any(is_reinstalled(name, entry, records.get(name, {})) for name in entry.names):
        detail = "it is no longer there, and RECORD has the digest of another file"
        return _row(key, entry, SlimStatus.LEFT, 0, detail)
    names = [tree.root / name for name in entry.names]
    ours = all(
        not os.path.lexists(name) and name.parent.is_dir() and name.parent.resolve() == name.parent
        for name in names
    )
    if entry.original is None or not ours:
        return _row(key, entry, SlimStatus.LEFT, 0, "it is no longer there")
    aside = _kept_original(names[0], entry)
    if dry_run:
        return _row(key, entry, SlimStatus.WOULD_UNDO, entry.original_size, None)
    put_back(aside, dict.fromkeys(names), entry, token, like=None)
    return _row(key, entry, SlimStatus.UNDONE, entry.original_size, None)


def _original_of(place: Path, entry: SlimmedFile) -> Path | None:
    """The kept original of a library; None: library and spare give it back."""
    if entry.spare is None or may_be_kept(entry):
        return _kept_original(place, entry)
    find_spare(place)
    return None


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


def _state(tree: Tree, name: str) -> FileState | None:
    group = tree.group_of(name)
    return None if group is None else group.state


def _row(
    key: str, entry: SlimmedFile, status: SlimStatus, after: int, detail: str | None
) -> SlimRow:
    return SlimRow(path=key, status=status, before=entry.size, after=after, detail=detail)
