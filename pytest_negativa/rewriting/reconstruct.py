"""Copies of a run's libraries: which are made anew, their manifest, waits of 3 s for locks.

The copy of ``/a/b.so`` is ``ROOT/a/b.so``. The folder also holds a manifest of what was written,
and two lock files. Writers take the first: a second one waits, and then finds the copies done.
Processes that run tests on the copies share the second until the tests end. A writer waits some
seconds for it, then reports an error. A copy gets its name after its check, so a reader without a
lock sees whole copies only.

A copy is used again if it was made from the same bytes by the same edits, and neither file was
written to since. The manifest notes size, times, inode and device of both files; no program can set
the change time. If a state differs, the file is hashed. On tmpfs, a write through a mapping changes
no time, so there copies are hashed before and after each use (1 s/GB).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import msgspec

from pytest_negativa.errors import NegativaError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import (
    FILL,
    Compaction,
    Manifest,
    ReconstructedLibrary,
    Reconstruction,
    RepackedCubin,
)
from pytest_negativa.models.spans import size
from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.records import CannotCompactError, CompactOptions
from pytest_negativa.rewriting.layout import (
    Edits,
    StoppedError,
    check_digest,
    merge_edits,
    state_at,
    state_of,
    write_copy,
)
from pytest_negativa.rewriting.plan_edits import overwrite, trim_kernels
from pytest_negativa.storage.atomic import remove_abandoned, write_atomically
from pytest_negativa.storage.flock import lock, open_to_lock
from pytest_negativa.storage.records import decode_versioned
from pytest_negativa.storage.system import available_cores, read_regular

MANIFEST_NAME = ".negativa-manifest.json"
WRITING_NAME = ".negativa-lock"
IN_USE_NAME = ".negativa-in-use"

PATIENCE = 3.0
"""Seconds that a writer waits for tests to end; a process that was killed takes a moment."""

_PAUSE = 0.1

# Longer than between two times that a file system tells apart, seconds.
_CLOCK_TICK = 0.02
_opened = partial(open_to_lock, flags=os.O_RDWR | os.O_CREAT, kind=ReconstructError)
# Part of each recipe. A higher version makes earlier copies be written again.
_WRITER_VERSION = 4


def reconstruct(
    planned: Sequence[AnalyzedLibrary],
    root: Path,
    *,
    fill: int = FILL,
    compact: CompactOptions | None = None,
    hashed: Iterable[TracedLibrary] = (),
    jobs: int | None = None,
    on_done: Callable[[int, int], None] | None = None,
    patience: float = PATIENCE,
) -> Reconstruction:
    """Make ``root`` hold a copy of every library that has unused code, and no other copy.

    Args:
        planned: the libraries of a run, each once.
        root: the folder, made if it isn't there. Other files in it are left alone.
        fill: the byte, 0 to 255, that unused code becomes.
        compact: take unused code out of the files. A library that compaction refuses gets a copy of
            its old size, and the result says why.
        hashed: libraries as they were when their digests were made. Others are hashed again.
        jobs: libraries at a time; by default one for each processor this process may use.
        on_done: called after each library with the bytes of originals done so far, and in all.
        patience: seconds to wait for tests that run on the copies.

    Returns:
        What was made. A library that can't be copied is in ``refused``, and has no copy.

    Raises:
        ReconstructError: the folder can't be made or locked, or tests run on its copies.
        StoreError: the manifest can't be written.
    """
    wanted = [p for p in planned if p.plan.unused_bytes or p.plan.trimmed]
    # The largest first, so that none is left to run alone at the end.
    wanted.sort(key=lambda p: (-p.plan.library.size, p.plan.library.path))
    with refusing(root, "made or written", ReconstructError):
        root.mkdir(parents=True, exist_ok=True)
        root = root.resolve()
    with writing_copies(root, patience):
        return _Reconstructor(root, fill, compact, hashed).run(
            wanted, jobs or available_cores(), on_done
        )


def copy_path(root: Path, path: str) -> Path:
    """Where the copy of the library ``path`` (a real path) lies below ``root``."""
    return root / path.lstrip("/")


class _Reconstructor:
    """Works on a folder whose lock is held."""

    def __init__(
        self,
        root: Path,
        fill: int,
        compact: CompactOptions | None,
        hashed: Iterable[TracedLibrary],
    ) -> None:
        self._root = root
        self._fill = fill
        self._compact = compact
        self._hashed = {(one.path, one.sha256): one.state for one in hashed}
        self._stop = threading.Event()
        self._known: dict[str, ReconstructedLibrary | None] = {}

    def run(
        self,
        wanted: Sequence[AnalyzedLibrary],
        jobs: int,
        on_done: Callable[[int, int], None] | None,
    ) -> Reconstruction:
        remove_abandoned(self._root / MANIFEST_NAME)
        self._known = self._load()
        # Named before they are written: if this process is killed, a later one knows which files
        # to remove.
        self._save({**dict.fromkeys((p.plan.library.path for p in wanted), None), **self._known})
        total = sum(p.plan.library.size for p in wanted)
        done = 0
        libraries: list[ReconstructedLibrary] = []
        refused: dict[str, str] = {}
        # Threads are enough: reading, writing and hashing release the GIL.
        with concurrent.futures.ThreadPoolExecutor(max(1, min(jobs, len(wanted)))) as pool:
            pending = {pool.submit(self._make, p): p.plan.library for p in wanted}
            try:
                for future in concurrent.futures.as_completed(pending):
                    library = pending[future]
                    try:
                        made = future.result()
                    except NegativaError as e:
                        refused[library.path] = str(e)
                    else:
                        if made != self._known[library.path]:
                            self._save({**self._known, library.path: made})
                        libraries.append(made)
                    done += library.size
                    if on_done is not None:
                        on_done(done, total)
            finally:
                # If interrupted, threads at work stop at their next step and leave nothing.
                self._stop.set()
                for future in pending:
                    future.cancel()
        self._remove_others({library.library.path for library in libraries})
        return Reconstruction(
            root=os.fspath(self._root),
            fill=self._fill,
            libraries=tuple(sorted(libraries, key=lambda made: made.library.path)),
            refused=dict(sorted(refused.items())),
        )

    def _make(self, planned: AnalyzedLibrary) -> ReconstructedLibrary:
        if self._stop.is_set():
            raise StoppedError
        plan = planned.plan
        library = plan.library
        edits = overwrite(planned.library_map, plan, self._fill)
        recipe = _recipe(plan, self._fill, self._compact)
        target = self._target(library.path)
        if (made := self._reusable(library, target, recipe)) is None:
            remove_abandoned(target)
            made = self._write(planned, edits, target, recipe)
        return made

    def _write(
        self, planned: AnalyzedLibrary, unused: Edits, target: Path, recipe: str
    ) -> ReconstructedLibrary:
        """Write a copy, compacted if that was asked for and compaction does not refuse.

        Args:
            unused: the edits that overwrite unused elements and frames.
        """
        plan = planned.plan
        trimmed, cubins = self._trim(planned)
        not_compacted = compaction = None
        if self._compact is not None:
            original = Path(plan.library.path)
            before = state_of(original)
            try:
                made = compact_library(
                    original, target, planned.library_map, plan, trimmed, self._compact
                )
            except CannotCompactError as e:
                not_compacted = e.reason
            else:
                sha256, state = made.sha256, state_of(target)
                compaction = Compaction(
                    size=made.size_after,
                    notes=made.notes,
                    kept=made.kept,
                )
        if compaction is None:
            edits = merge_edits(unused, trimmed)
            library = plan.library
            hashed = self._hashed.get((library.path, library.sha256))
            sha256, state, before = write_copy(
                library, target, edits, self._stop.is_set, hashed=hashed
            )
        return ReconstructedLibrary(
            library=plan.library,
            recipe=recipe,
            copy=os.fspath(target),
            copy_sha256=sha256,
            unused=unused.filled,
            unused_bytes=size(unused.filled),
            elements=len(unused.fills),
            reused=False,
            repacked=cubins,
            compaction=compaction,
            not_compacted=not_compacted,
            copy_state=state,
            original_state=before,
        )

    def _trim(self, planned: AnalyzedLibrary) -> tuple[Edits, tuple[RepackedCubin, ...]]:
        """The edits inside cubins that stay. If there are none, no file is read."""
        plan = planned.plan
        if not plan.trimmed:
            return Edits(plan.library.size), ()
        with ByteSource(plan.library.path) as source:
            return trim_kernels(source, planned.library_map, plan, self._fill)

    def _target(self, path: str) -> Path:
        """The path of the copy, whose folder is made.

        A link inside the folder is refused: it could lead out of it, even to the original.
        """
        target = copy_path(self._root, path)
        with refusing(target.parent, "made", ReconstructError):
            target.parent.mkdir(parents=True, exist_ok=True)
            real = target.parent.resolve()
        if real != target.parent or not target.is_relative_to(self._root):
            raise ReconstructError(f"{target}: leads to {real}; remove the link, or use {path}")
        return target

    @cached_property
    def _shows_writes(self) -> bool:
        return _shows_mapped_writes(self._root)

    def _reusable(
        self, library: LibraryIdentity, target: Path, recipe: str
    ) -> ReconstructedLibrary | None:
        """The copy at ``target`` if it is what would be written."""
        made = self._known.get(library.path)
        if made is None or made.recipe != recipe:
            return None
        with refusing(library.path, "compared", ReconstructError):
            copy, original = state_at(target), state_at(Path(library.path))
        # A link is no copy, whatever it leads to.
        if copy is None or copy.size != made.copy_state.size or target.is_symlink():
            return None
        is_known = copy == made.copy_state and self._shows_writes
        if not is_known and digest_of(target) != made.copy_sha256:
            return None
        if original != made.original_state:
            original = check_digest(library)
        return msgspec.structs.replace(
            made, library=library, reused=True, copy_state=copy, original_state=original
        )

    def _remove_others(self, wanted: set[str]) -> None:
        """Remove the copies that the manifest names and this reconstruction doesn't."""
        kept = {path: record for path, record in self._known.items() if path in wanted}
        for path in self._known.keys() - kept.keys():
            target = copy_path(self._root, path)
            if target.parent.resolve() != target.parent:
                continue
            remove_abandoned(target)
            # Reconstruction makes no folder of that name.
            with (
                refusing(target, "removed", ReconstructError),
                contextlib.suppress(FileNotFoundError, IsADirectoryError),
            ):
                target.unlink()
            # The folder itself has its manifest.
            with contextlib.suppress(OSError):
                os.removedirs(target.parent)
        self._save(kept)

    def _load(self) -> dict[str, ReconstructedLibrary | None]:
        path = self._root / MANIFEST_NAME
        with refusing(path, "read"), contextlib.suppress(FileNotFoundError):
            data = read_regular(path, follow=False)
            what, remedy = "a manifest", f"remove {self._root}"
            manifest = decode_versioned(data, Manifest, origin=str(path), what=what, remedy=remedy)
            return dict(manifest.copies)
        return {}

    def _save(self, copies: Mapping[str, ReconstructedLibrary | None]) -> None:
        self._known = dict(copies)
        manifest = Manifest(copies=self._known)
        data = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)
        write_atomically(self._root / MANIFEST_NAME, data)


def _recipe(plan: LibraryPlan, fill: int, compact: CompactOptions | None) -> str:
    # The edits follow from it. Those inside cubins are known only after unpacking.
    unused = [(d.start, d.end) for d in plan.decisions if not d.kept]
    what = (_WRITER_VERSION, plan.library.sha256, unused, plan.trimmed, fill, repr(compact))
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()


# ---- Locks of the folder ----


@contextlib.contextmanager
def writing_copies(root: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other writers and test runs away from a folder of copies.

    Args:
        root: the folder, which must exist.
        patience: seconds to wait for tests that run on the copies.

    Raises:
        ReconstructError: the folder can't be locked, or tests still run on its copies.
    """
    with _opened(root / WRITING_NAME) as writing, _opened(root / IN_USE_NAME) as in_use:
        _lock(root, writing)
        give_up = time.monotonic() + patience
        while not _lock(root, in_use, wait=False):
            if time.monotonic() > give_up:
                raise ReconstructError(
                    f"{root}: its copies are in use by a verification (lslocks lists its process); "
                    "wait until it ends, or use another folder for runs"
                )
            time.sleep(_PAUSE)
        yield


@contextlib.contextmanager
def hold_copies(root: Path) -> Iterator[None]:
    """Keep writers away from a folder of copies while tests run on it.

    Several processes may hold the folder. The call waits for a writer at work. The holder can't
    write there either. ``check_copies`` tells whether the files changed before the folder was held.

    Args:
        root: the folder, which must exist.

    Raises:
        ReconstructError: the folder can't be locked.
    """
    with _opened(root / IN_USE_NAME) as in_use:
        _lock(root, in_use, shared=True)
        yield


def check_copies(reconstruction: Reconstruction) -> tuple[str, ...]:
    """Tell which copies and originals changed since the copies were written, a sentence for each.

    Ask after the tests: if a file changed, the bytes that the tests ran on are not known.
    """
    problems = []
    copies = reconstruction.libraries
    is_blind = any(Path(one.copy).exists() for one in copies) and not _shows_mapped_writes(
        Path(reconstruction.root)
    )
    for library in copies:
        for path, known, digest in (
            (library.copy, library.copy_state, library.copy_sha256 if is_blind else None),
            (library.library.path, library.original_state, None),
        ):
            found = None
            with contextlib.suppress(OSError):
                found = state_at(Path(path))
            if found is None:
                problems.append(f"{path} was removed while the tests ran")
            elif found != known or (digest is not None and digest_of(Path(path)) != digest):
                problems.append(f"{path} changed while the tests ran")
    return tuple(problems)


def _shows_mapped_writes(folder: Path) -> bool:
    """Whether a write through a mapping changes the state of a file in the folder."""
    with refusing(folder, "written", ReconstructError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
        file.flush()
        before = state_of(file.fileno())
        time.sleep(_CLOCK_TICK)
        with mmap.mmap(file.fileno(), 1) as view:
            view[0] ^= 1  # On tmpfs, what was read is writable without a further fault.
        return state_of(file.fileno()) != before


def _lock(root: Path, file: int, *, shared: bool = False, wait: bool = True) -> bool:
    with refusing(root, "locked", ReconstructError):
        return lock(file, shared=shared, wait=wait)
