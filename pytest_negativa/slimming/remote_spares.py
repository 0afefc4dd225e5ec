"""Spares at URLs: sends those of slimmed libraries, and fetches those that are missing.

A spare lies at ``URL/NAME`` in the form of ``storage.published``. Its name has a digest of the
original and of what was taken out, so a spare at a URL never changes. The manifest of the slimmed
folder has the URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_negativa.errors import (
    NegativaError,
    OptionError,
    ReconstructError,
    StoreError,
)
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.rewriting.compact.rebuild import check_pair
from pytest_negativa.slimming.folder_locks import hold
from pytest_negativa.slimming.manifest import load_manifest, save_manifest, token_of
from pytest_negativa.slimming.slim import roots_of, scan
from pytest_negativa.slimming.spares import (
    find_spare,
    hold_folder,
    note_of,
)
from pytest_negativa.slimming.tree import Tree
from pytest_negativa.spare.note import MAX_TRAILER, Note
from pytest_negativa.storage.atomic import sync_folder
from pytest_negativa.storage.published import fetch, publish
from pytest_negativa.storage.published import load_manifest as load_published
from pytest_negativa.storage.shared_folders import refuse_shared, set_mode
from pytest_negativa.storage.urls import Url


def push_spares(paths: Sequence[Path], url: Url) -> list[SlimRow]:
    """Send the spares of slimmed libraries, and note the URL in the manifests of their folders.

    Args:
        paths: folders that were slimmed, or libraries of them.
        url: where spares lie, each below its name.

    Returns:
        A row for each library with a spare.

    Raises:
        NegativaError: a folder or manifest can't be read or written.
    """
    with hold(*roots_of(paths)):
        return [row for tree in scan(paths) for row in _push_tree(tree, url)]


def _push_tree(tree: Tree, url: Url) -> list[SlimRow]:
    def push(library: Path, _note: Note) -> str:
        spare = find_spare(library)
        # The one that is here may be removed once it is there.
        check_pair(library, spare)
        sent, _ = publish(spare.name, {spare.name: spare}, url / spare.name)
        return "its spare was sent" if sent else "its spare was there"

    rows = [*_each(tree, push)]
    manifest = load_manifest(tree.root)
    # A URL that takes nothing is no place to look at.
    if manifest.slimmed and any(row.status is SlimStatus.SOUND for row in rows):
        manifest = msgspec.structs.replace(manifest, spares=url.text)
        save_manifest(tree.root, manifest, token_of(manifest))
    return rows


def fetch_spares(paths: Sequence[Path], folder: Path) -> list[SlimRow]:
    """Fetch the spares that libraries lack, from the URL in the manifest of their folder.

    Args:
        paths: see ``push_spares``.
        folder: where spares go; it is made if a spare is missing.

    Returns:
        A row for each library with a spare.

    Raises:
        NegativaError: a folder or manifest can't be read, or see ``refuse_shared``.
    """
    refuse_shared(*roots_of(paths))
    with contextlib.ExitStack() as held:
        unchecked: list[Path] = []
        trees = scan(paths)
        return [row for tree in trees for row in _fetch_tree(tree, folder, held, unchecked)]


def _fetch_tree(
    tree: Tree, folder: Path, held: contextlib.ExitStack, unchecked: list[Path]
) -> Iterator[SlimRow]:
    """Fetch for one folder; ``folder`` is held from the first spare on that is missing."""
    url = load_manifest(tree.root).spares

    def fetch_one(library: Path, note: Note) -> str:
        if (detail := _find(library, note, folder)) is not None:
            return detail
        if not unchecked:
            unchecked.append(held.enter_context(hold_folder(folder, tree.root)))
        # Another process may have fetched it meanwhile.
        return _find(library, note, folder) or _fetch(library, note, url, unchecked[0])

    return _each(tree, fetch_one)


def _find(library: Path, note: Note, folder: Path) -> str | None:
    """Where the spare of a library is; None: it is missing."""
    target = folder / note.spare_name
    if target.parent != folder:
        raise ReconstructError(f"{library}: its spare's name {note.spare_name!r} is a path")
    if target.exists():
        check_pair(library, target)
        return "its spare is here"
    try:
        found = find_spare(library)
    except ReconstructError:
        return None
    check_pair(library, found)
    return f"its spare is {found}"


def _fetch(library: Path, note: Note, url: str | None, unchecked: Path) -> str:
    """Fetch a spare; what happened. ``unchecked``: see ``hold_folder``."""
    folder, new = unchecked.parent, unchecked / note.spare_name
    if url is None:
        raise OptionError("no URL of spares is known; send them with negativa push --spares URL")
    owner = library.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise ReconstructError(
            f"no process would use a spare of this user; fetch as root or as user {owner}, who "
            "owns the library"
        )
    place = Url(url) / note.spare_name
    published = load_published(place)
    if [file.path for file in published.files] != [note.spare_name]:
        raise StoreError(f"{place}: is no spare; send it again with negativa push --spares")
    fetch(place, published, unchecked, max_bytes=note.original_size + MAX_TRAILER)
    try:
        # Its code runs in the processes: the digest of the original decides, not the store's.
        check_pair(library, new)
    except NegativaError as e:
        new.unlink()
        raise ReconstructError(f"{place}: not taken: {e}") from e
    # Processes of all users who can read the library need it.
    set_mode(new, 0o644)
    new.replace(folder / note.spare_name)
    sync_folder(folder)
    if str(folder) in note.folders:
        return "its spare was fetched"
    return f"its spare was fetched; programs find it with NEGATIVA_SPARE_DIR={folder}"


def _each(tree: Tree, work: Callable[[Path, Note], str]) -> Iterator[SlimRow]:
    """Do something for each library that was cut; ``work`` says what was done."""
    for group in filter(tree.is_library, tree.groups):
        library, status = tree.root / group.name, SlimStatus.SOUND
        try:
            if (note := note_of(library)) is None:
                continue
            detail = work(library, note)
        except (NegativaError, OSError) as e:
            status, detail = SlimStatus.FAILED, str(e).removeprefix(f"{library}: ")
        yield SlimRow.unchanged(group.name, status, group.size, detail)
