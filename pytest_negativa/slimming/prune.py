"""Removes spares that no library needs any more, such as those of earlier slims.

A folder of spares belongs to the libraries of one folder, or of those that were slimmed together.
A spare that one of them needs stays. A copy of such a folder, as in an image, is known only if the
caller names it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, StoreError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.slim import scan
from pytest_negativa.slimming.spares import (
    disown,
    hold_alone,
    note_of,
    owners_of,
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
        NegativaError: a file can't be read or removed.
    """
    if not (folder / ORIGINALS_MARK).is_file():
        if not folder.is_dir():
            raise OptionError(f"{folder}: no such folder; name one that slim --spare wrote")
        raise OptionError(
            f"{folder}: not written by slim --spare: it has no {ORIGINALS_MARK}; the spares in it "
            "stay"
        )
    with hold_alone(folder):
        found = find_unneeded(folder, paths, is_alone=True)
        if not dry_run:
            remove_unchecked(folder)
        if dry_run or (found.unknown and not force):
            return found
        for spare in found.unneeded:
            remove_file(spare)
        for root in owners_of(folder):
            with contextlib.suppress(StoreError):  # A damaged manifest may have needed some.
                if not _names(root):
                    disown(folder, root)
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
    if by_manifests:
        names = {name: one for root in owners_of(folder) for name, one in _names(root).items()}
    else:
        names = _needed(folder, paths, unknown)
    spares = sorted(filter(is_spare, folder.iterdir()))
    unneeded = tuple(path for path in spares if path.name not in names)
    left = tuple(unchecked_in(folder)) if is_alone else ()
    return Spares(
        {path: names[path.name] for path in spares if path.name in names},
        unneeded,
        _on_disk(spares),
        _on_disk(unneeded),
        tuple(unknown),
        left,
        _on_disk(path for one in left for path in one.rglob("*")),
    )


def _on_disk(paths: Iterable[Path]) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def _needed(folder: Path, paths: Sequence[Path], unknown: list[str]) -> dict[str, Path]:
    """Names of the spares that libraries need, with one library of each.

    ``unknown`` gets why more may be needed.
    """
    trees = scan(paths) if paths else []
    whole = {tree.root for tree in trees if not tree.partial}
    for root in owners_of(folder):
        if root in whole:
            continue
        if _has_slimmed(root):
            trees += scan([root])
        else:
            unknown.append(f"{root} was slimmed with spares here, and has no slimmed library now")
    needed = {name: path for tree in trees for name, path in _needed_by(tree, unknown).items()}
    for tree in trees:
        try:
            needed = _names(tree.root, tree, needed) | needed
        except StoreError as e:
            unknown.append(str(e))
    return needed


def _has_slimmed(root: Path) -> bool:
    try:
        return bool(load_manifest(root).slimmed)
    except StoreError:
        return True  # Nothing tells, so its libraries are looked at.


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
