"""The slimmed libraries of a folder, and where the original of each is.

The original was kept, or the library and its spare give it back. The manifest lists slimmed
libraries. A library with a spare says itself what its original was, so it needs no entry.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile
from pytest_negativa.slimming.manifest import (
    UNREADABLE,
    Fate,
    how_to_reinstall,
    is_result,
    is_uninstalled,
    judge,
    may_be_kept,
)
from pytest_negativa.slimming.spares import find_spare, note_of
from pytest_negativa.slimming.tree import MANIFEST_NAME, FileGroup, Tree


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A slimmed library that is there.

    Attributes:
        key: of its entry.
        entry: what the manifest says, or the library itself.
        results: those of its names that lead to the result, or to what became of it.
        originals: those that lead to the original, because a run was killed between the names.
        sha256: of the file to which the first of them leads.
        is_whole: all are the result, as it was written.
        problem: why nothing is known of the file that is there.
    """

    key: str
    entry: SlimmedFile
    results: tuple[str, ...]
    sha256: str | None
    originals: tuple[str, ...] = ()
    is_whole: bool = True
    problem: str | None = None

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
    if unreadable := tuple(found[Fate.UNREADABLE]):
        return Slimmed(key, entry, unreadable, None, is_whole=False, problem=UNREADABLE)
    results, originals = tuple(found[Fate.RESULT]), tuple(found[Fate.ORIGINAL])
    if not results:
        return None
    groups = filter(None, map(tree.group_of, results))
    digests = [tree.digest(group) for group in groups]
    is_whole = set(digests) == {entry.sha256} and not originals
    return Slimmed(key, entry, results, digests[0], originals, is_whole)


def by_spare(
    tree: Tree, manifest: SlimManifest, lost: dict[FileGroup, str]
) -> Iterator[tuple[FileGroup, SlimmedFile]]:
    """The slimmed libraries that the manifest does not name, with entries as of a manifest.

    ``lost`` gets the problem of those whose original nothing gives back.
    """
    known = {name for entry in manifest.slimmed.values() for name in entry.names}
    for group in tree.groups:
        is_listed = not known.isdisjoint(group.names)
        if not is_listed and tree.is_library(group) and tree.facts(group).is_slimmed:
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
    if found[Fate.RESULT] or found[Fate.UNREADABLE]:
        return False
    if found[Fate.ORIGINAL]:
        return True
    if may_be_kept(entry):
        return False
    return bool(found[Fate.ANOTHER]) or entry.spare is None or is_uninstalled(tree.root, entry)
