"""Order of notes in a folder's run: manifest before each change, RECORD last; who holds folders.

The manifest has the run before the first change, and a library's entry before the library is
replaced. So after a crash, the file of an entry may still be the old one, and the next run slims
it. There is never a new file without an entry. The entries of originals that are back go last: only
they tell that RECORD has lines to change.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.installed.record import RecordLine, record_digest
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile
from pytest_negativa.rewriting.layout import state_at
from pytest_negativa.slimming.atomic_replacement import look
from pytest_negativa.slimming.manifest import load_manifest, save_manifest
from pytest_negativa.slimming.tree import MANIFEST_NAME, Tree, roots_of, scan, staged_name
from pytest_negativa.storage.flock import held
from pytest_negativa.storage.shared_folders import refuse_shared


class Journal:
    """The notes of a run on one folder.

    Args:
        tree: the folder as it was found.
        held: the folders that this process has locked.

    Attributes:
        root: the folder.
        token: of the run.
    """

    def __init__(self, tree: Tree, held: Sequence[Path] = ()) -> None:
        self.tree = tree
        self.root = tree.root
        self.token = secrets.token_hex(8)
        self.held = tuple(held)
        self._back: dict[str, tuple[SlimmedFile, Sequence[str]]] = {}

    @functools.cached_property
    def manifest(self) -> SlimManifest:
        """The notes of what was done there, read when they are needed first.

        Raises:
            StoreError: see ``load_manifest``.
        """
        return load_manifest(self.root)

    @property
    def is_empty(self) -> bool:
        """Whether a manifest lies there, and nothing in it counts any more."""
        return not self.manifest.slimmed and (self.root / MANIFEST_NAME).is_file()

    def places(self, names: Iterable[str]) -> dict[Path, FileState | None]:
        """The places of names, with the state of the file to replace; None if none is there.

        Nothing is written to a place that did not come from here.

        Raises:
            ReconstructError: another user can exchange what root works on.
            TakenError: a file was changed or replaced since it was listed.
        """
        places = {
            self.root / name: None if (group := self.tree.group_of(name)) is None else group.state
            for name in names
        }
        refuse_shared(*{place.parent for place in places})
        for place, state in places.items():
            look(place, state, by_ctime=True)
        return places

    def save(self, **changes: Any) -> None:
        """Write the manifest with other fields; an interruption finds the old ones or these.

        Raises:
            StoreError: it can't be written.
        """
        self.manifest = replace(self.manifest, **changes)
        save_manifest(self.root, self.manifest, self.token)

    @contextlib.contextmanager
    def at_work(self, spares: Iterable[Path] = ()) -> Iterator[None]:
        """Note the run, and its ``run_spares``, while the block works.

        If the block fails, the notes stay: the next run has to finish the work.

        Raises:
            StoreError: the manifest can't be written.
        """
        folders = tuple(sorted({*self.manifest.run_spares, *map(str, spares)}))
        self.save(run=self.token, run_spares=folders)
        yield
        self.save(run=None, run_spares=())

    def note_back(self, key: str, entry: SlimmedFile, names: Sequence[str]) -> None:
        """Note that names lead to an original again: ``finish`` gives RECORD files its lines."""
        self._back[key] = entry, names

    def finish(self) -> None:
        """Bring RECORD and conda's files in line with the libraries, and forget what is back.

        Raises:
            StoreError: a RECORD can't be read or written; the others are.
        """
        # Of an original that was back, this run may have made a result under another key.
        back = {
            os.path.join(self.root, name): RecordLine(
                record_digest(entry.original_sha256), str(entry.original_size)
            )
            for entry, names in self._back.values()
            for name in names
        }
        lines = back | {
            os.path.join(self.root, name): RecordLine(record_digest(entry.sha256), str(entry.size))
            for entry in self.manifest.slimmed.values()
            for name in entry.names
            if _is_result(self.root / name, entry)
        }
        problem: NegativaError | None = None
        # conda lists the RECORD files in its environment.
        for installed in (one for site in reversed(self.tree.sites) for one in site.installed):
            wanted = {path: lines[path] for path in installed.libraries.keys() & lines}
            try:
                if wanted:
                    with hold_metadata(installed.record.parent, self.root, *self.held):
                        installed.update(wanted, staged_name(installed.record, self.token))
                    lines |= _line_of(installed.record)
            except NegativaError as e:
                problem = e
        if problem is not None:
            raise problem
        for key in self._back:
            self.manifest.slimmed.pop(key, None)


def _line_of(record: Path) -> dict[str, RecordLine]:
    """The line of a RECORD in ``conda-meta``, by its path; none if it is not there."""
    if (digest := digest_of(record)) is None:
        return {}
    return {str(record): RecordLine(record_digest(digest), str(record.stat().st_size))}


@contextlib.contextmanager
def hold(*roots: Path) -> Iterator[None]:
    """Wait until no other process works in these folders, and keep others out.

    Parent folders are locked shared, always from the outermost inwards, which rules out deadlock.

    Args:
        roots: real paths.

    Raises:
        ReconstructError: a folder can't be opened, or another user can exchange what root works on.
    """
    manifests = (root / MANIFEST_NAME for root in roots)
    refuse_shared(*roots, *manifests)
    is_shared = {folder: True for root in roots for folder in root.parents}
    is_shared.update(dict.fromkeys(roots, False))
    with contextlib.ExitStack() as stack:
        for folder in sorted(is_shared):
            # A user who may not read a parent can't slim it either.
            with contextlib.suppress(*([ReconstructError] if is_shared[folder] else [])):
                stack.enter_context(held(folder, shared=is_shared[folder]))
        yield


@contextlib.contextmanager
def hold_metadata(folder: Path, *roots: Path) -> Iterator[None]:
    """Hold the metadata of a distribution while ``roots`` are held.

    A process that slims a part of a site writes to RECORD files beside that part. They may lie in
    another of the roots (``site-packages/*``); then the process holds them already.

    Raises:
        ReconstructError: see ``hold``.
    """
    refuse_shared(folder)
    is_held = {folder, *folder.parents}.intersection(roots)
    with contextlib.nullcontext() if is_held else held(folder):
        yield


@contextlib.contextmanager
def open_journals(paths: Sequence[Path], *, dry_run: bool) -> Iterator[list[Journal]]:
    """The journals of the folders, which this process holds, without what killed runs left.

    Args:
        paths: folders and files.
        dry_run: remove nothing.

    Raises:
        OptionError: see ``scan``.
        NegativaError: a folder can't be held.
    """
    with hold(*roots_of(paths)):
        trees = scan(paths)
        leftovers = [] if dry_run else [path for tree in trees for path in tree.leftovers]
        for path in leftovers:
            # A folder that can't be written is the business of the work that follows.
            with contextlib.suppress(OSError, ReconstructError):
                refuse_shared(path.parent)
                path.unlink()
        # A leftover may have been one more name of a library.
        trees = scan(paths) if leftovers else trees
        yield [Journal(tree, held=[tree.root for tree in trees]) for tree in trees]


def _is_result(path: Path, entry: SlimmedFile) -> bool:
    with contextlib.suppress(OSError):
        state = state_at(path)
        return state is not None and (state.size, state.mtime_ns) == (entry.size, entry.mtime_ns)
    return False
