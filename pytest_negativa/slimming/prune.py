"""Removes spares that no library needs any more, such as those of earlier slims.

A folder of spares notes which folders were slimmed into it. A spare that a library in one of them
needs stays. A copy of such a folder, as in an image, is known only if the caller names it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, StoreError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.slim import scan
from pytest_negativa.slimming.spares import (
    hold_alone,
    note_of,
    noted_trees,
    remove_unchecked,
    unchecked_in,
)
from pytest_negativa.slimming.tree import ORIGINALS_MARK, Tree
from pytest_negativa.slimming.undo import is_forgotten
from pytest_negativa.spare.note import MAGIC, MAX_TRAILER, PAGE_SIZE, trailer_offset, unpack_trailer
from pytest_negativa.storage.atomic import remove_file

_NAME = re.compile(r".+\.([0-9a-f]{16})\.spare", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spares:
    """The spares in a folder; sizes in bytes on disk, for the files are sparse.

    Attributes:
        needed, unneeded: the files. What is no spare is in neither. Each needed one has the
            library that needs it.
        size, unneeded_size: of all spares, and of those that no library needs.
        unknown: why other libraries may need them, a sentence each.
        left, left_size: what killed runs left, which no library needs.
    """

    needed: dict[Path, Path]
    unneeded: tuple[Path, ...]
    size: int
    unneeded_size: int
    unknown: tuple[str, ...]
    left: tuple[Path, ...] = ()
    left_size: int = 0


def prune_spares(
    folder: Path, paths: Sequence[Path], *, dry_run: bool = False, force: bool = False
) -> Spares:
    """Remove the spares in a folder that no library needs.

    Args:
        folder: the folder of spares.
        paths: folders, or libraries, that may need them, beside those that the folder notes.
        dry_run: remove nothing.
        force: remove them also if not all libraries are known that may need them.

    Returns:
        What was there. No spare was removed if something is unknown, unless it was forced.

    Raises:
        OptionError: the folder has no spares, or a path is wrong.
        NegativaError: slim is at work there, or a file can't be read or removed.
    """
    if not (folder / ORIGINALS_MARK).is_file():
        raise OptionError(f"{folder}: no folder of spares: it has no {ORIGINALS_MARK}")
    with hold_alone(folder):
        found = find_unneeded(folder, paths, is_alone=True)
        if not dry_run:
            remove_unchecked(folder)
        if dry_run or (found.unknown and not force):
            return found
        for spare in found.unneeded:
            remove_file(spare)
        for note, root in noted_trees(folder).items():
            with contextlib.suppress(StoreError):  # A damaged manifest may have needed some.
                if not _names(root):
                    remove_file(note)
    return found


def find_unneeded(
    folder: Path,
    paths: Sequence[Path] = (),
    *,
    by_manifests: bool = False,
    is_alone: bool = False,
) -> Spares:
    """Find the spares in a folder that no library needs.

    Args:
        folder, paths: see ``prune_spares``.
        by_manifests: look at no library: what manifests name is needed.
        is_alone: the caller holds the folder alone, so what runs left is of killed ones.

    Raises:
        NegativaError: a path is wrong, or a file can't be read.
    """
    unknown: list[str] = []
    names: dict[str, Path] = {}
    trees = scan(paths) if paths else []
    covered = {tree.root for tree in trees if not tree.partial}
    for root in noted_trees(folder).values():
        if root in covered:
            continue
        try:
            is_slimmed = bool(load_manifest(root).slimmed)
            if by_manifests:
                names |= _names(root)
        except StoreError:
            if by_manifests:
                raise
            is_slimmed = True
        if not is_slimmed:
            unknown.append(f"{root} was slimmed with spares here, and has no slimmed library now")
        elif not by_manifests:
            trees += scan([root])
    for tree in trees:
        names |= _needed_by(tree, unknown)
    for tree in trees:
        try:
            names = _names(tree.root, tree, names) | names
        except StoreError as e:
            unknown.append(str(e))
    needed, unneeded = {}, []
    size = unneeded_size = 0
    for path in sorted(folder.iterdir()):
        if not is_spare(path):
            continue
        on_disk = path.stat().st_blocks * 512
        size += on_disk
        if path.name in names:
            needed[path] = names[path.name]
        else:
            unneeded.append(path)
            unneeded_size += on_disk
    left = tuple(unchecked_in(folder)) if is_alone else ()
    return Spares(
        needed,
        tuple(unneeded),
        size,
        unneeded_size,
        tuple(unknown),
        left,
        sum(path.lstat().st_blocks * 512 for one in left for path in one.rglob("*")),
    )


def _names(root: Path, tree: Tree | None = None, known: Container[str] = ()) -> dict[str, Path]:
    """Names of the spares that the manifest of a slimmed folder needs, with a library of each.

    By the name alone, which has a digest: ``negativa fetch`` may have put one elsewhere.

    Args:
        root: the folder.
        tree: its files; with them, what was uninstalled needs no spare.
        known: names that are needed in any case.
    """
    needed = {}
    for key, entry in load_manifest(root).slimmed.items():
        if entry.spare is None or (name := Path(entry.spare).name) in known:
            continue
        if tree is None or not tree.covers(entry.names) or not is_forgotten(tree, key, entry):
            needed[name] = root / key
    return needed


def _needed_by(tree: Tree, unknown: list[str]) -> dict[str, Path]:
    """Names of the spares that libraries name, with one library of each.

    ``unknown`` gets what can't be read.
    """
    needed = {}
    unknown += [f"{tree.root / row.path}: {row.detail}" for row in tree.unlisted_rows()]
    for group in (*tree.groups, *tree.unnamed):
        path = tree.root / group.name
        try:
            if tree.is_library(group) and (note := note_of(path)) is not None:
                needed[note.spare_name] = path
        except FormatError as e:
            unknown.append(str(e))
    return needed


def is_spare(path: Path) -> bool:
    """Whether a file is a spare, by its name and its trailer.

    Raises:
        ReconstructError: a file of such a name can't be read.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_file():
        return False
    try:
        with ByteSource(path) as source:
            start = max(source.size - MAX_TRAILER, 0) // PAGE_SIZE * PAGE_SIZE
            tail = source.read(start, source.size - start)
    except FormatError as e:
        raise ReconstructError(str(e)) from e
    for at in range(0, len(tail), PAGE_SIZE):
        if tail.startswith(MAGIC, at):
            try:
                trailer = unpack_trailer(tail[at:], str(path), start + at)
            except FormatError:
                continue
            is_here = trailer_offset(trailer.original_size) == start + at
            if is_here and trailer.pair.hex().startswith(match[1]):
                return True
    return False
