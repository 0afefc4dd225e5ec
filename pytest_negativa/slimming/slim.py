"""``negativa slim`` and ``undo``: the order of work on a library; killed, all is whole; --dry-run.

For each library, the slimmer writes and checks the new file under a hidden name. It keeps the
original if asked to, writes the manifest, and then renames the new file. It updates RECORD files at
the end. The next run finishes what a killed run left undone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.slimming import (
    PROBLEMS,
    UNMET,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.rewriting.compact.rebuild import (
    OriginalSource,
    check_pair,
    rebuild_original,
)
from pytest_negativa.rewriting.compact.records import CannotCompactError, Cut
from pytest_negativa.rewriting.layout import state_at
from pytest_negativa.slimming.atomic_replacement import (
    copy_file,
    is_same_file,
    keep_original,
    look,
    replace_all,
    take_out,
)
from pytest_negativa.slimming.code_files import add_files, together
from pytest_negativa.slimming.journal import open_journals
from pytest_negativa.slimming.manifest import spares_of
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    Kind,
    Removal,
    names_of,
    plan_library,
    slim_library,
)
from pytest_negativa.slimming.request import (
    OnDone,
    OnProgress,
    SlimOptions,
    SlimReport,
    SlimRequest,
    counter,
    refuse_contradictions,
)
from pytest_negativa.slimming.slimmed import UNREADABLE
from pytest_negativa.slimming.spares import (
    LEAST_HOLE,
    clear_abandoned,
    hold_folder,
    least_hole,
    publish,
    release,
    remove_unchecked,
)
from pytest_negativa.slimming.tree import FileGroup, roots_of, staged_name
from pytest_negativa.slimming.worklist import Task, WorkList, find_originals, find_work
from pytest_negativa.storage.atomic import remove_abandoned
from pytest_negativa.storage.system import available_cores

_NOTHING = hashlib.sha256().hexdigest()


def slim_trees(
    request: SlimRequest,
    on_progress: OnProgress = lambda done, total: None,
) -> SlimReport:
    """Slim libraries: list and hold their folders, find the work, and do it.

    Args:
        request: what to slim, and how.
        on_progress: told of the work.

    Raises:
        OptionError: the request contradicts itself; nothing was done.
        NegativaError: a folder can't be read or written. What was done stays done, and the same
            call does the rest.
    """
    roots = roots_of(request.paths)
    refuse_contradictions(request, roots)
    with open_journals(request.paths, dry_run=request.options.dry_run) as journals:
        work, unmet = find_work(journals, request)
        unmet += add_files(work, request)
        if request.require:
            # They won't become what the lock wants.
            known = (row for folder in work for row in folder.rows)
            missed = (*unmet, *(row for row in known if row.status in PROBLEMS | UNMET))
            if missed:
                return SlimReport(missed, stopped=True)
        return _slim_folders(work, unmet, request.options, on_progress)


def undo_trees(
    paths: Sequence[Path],
    *,
    dry_run: bool = False,
    on_done: OnProgress = lambda done, total: None,
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
    options = SlimOptions(dry_run=dry_run, jobs=available_cores())
    with open_journals(paths, dry_run=dry_run) as journals:
        for journal in journals:
            try:
                work = find_originals(journal, options)
                made = Slimmer(work).run(counter(work.size, on_done))
                rows += sorted(made, key=lambda row: row.path)
            except NegativaError as e:
                rows.append(SlimRow.unchanged(f"{journal.root}/", SlimStatus.FAILED, 0, str(e)))
    return rows


def _slim_folders(
    folders: Sequence[WorkList],
    unmet: Sequence[SlimRow],
    options: SlimOptions,
    on_progress: OnProgress,
) -> SlimReport:
    """Do the work in folders, or foresee what that would do.

    Args:
        folders: the work in each.
        unmet: rows of what is in none of them.
        options: how to do it.
        on_progress: told of the work.

    Raises:
        NegativaError: a folder can't be read or written.
    """
    slimmers = [Slimmer(folder) for folder in folders]
    count = counter(sum(folder.size for folder in folders), on_progress)
    holes = min_hole = 0
    if (spare := options.spare) is not None:
        holes = sum(slimmer.count_holes(without_tasks=True) for slimmer in slimmers)
        sizes = [size for slimmer in slimmers for size in slimmer.foresee_holes()]
        min_hole = least_hole(sizes, spare.most_holes - holes)
        holes += sum(size >= min_hole for size in sizes)
    rows = [row for slimmer in slimmers for row in slimmer.run(count, min_hole)]
    if not options.dry_run:
        holes = sum(slimmer.count_holes() for slimmer in slimmers)
    return SlimReport(
        tuple(sorted((*unmet, *rows), key=lambda row: row.path)),
        holes=holes,
        min_hole=min_hole,
    )


class Slimmer:
    """Applies the work list of one folder.

    Args:
        work: what is to be done.

    Attributes:
        rows: what became of each library.
    """

    def __init__(self, work: WorkList) -> None:
        self.journal = work.journal
        self.work = work
        self.options = work.options
        self.rows = work.rows
        self._min_hole = LEAST_HOLE
        # What ``foresee_holes`` found, by name.
        self._planned: dict[str, Removal] = {}
        # Those that libraries had before.
        self._spares: set[Path] = set()
        # Whether files are back that may not be on disk yet.
        self._unsynced = False
        # Files that are to go.
        self._removals: list[tuple[Task, FileGroup]] = []

    def foresee_holes(self) -> list[int]:
        """Sizes in bytes of the holes that the libraries of the work list could have."""
        tasks = [task for task in self.work.tasks if task.recipe.spare is not None]
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(self._foresee, tasks))
        return [size for planned in self._planned.values() for size in planned.hole_sizes]

    def _foresee(self, task: Task) -> None:
        """Plan a library; if that fails, the work on it will tell why."""
        with contextlib.suppress(NegativaError), self._original(task) as source:
            self._planned[task.name] = plan_library(task.recipe, source)

    @contextlib.contextmanager
    def _original(self, task: Task) -> Iterator[ByteSource]:
        """The original, open for reading; of one with a spare, the digest is not compared."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(ByteSource(task.source))
            if task.spare is not None:
                source = OriginalSource(source, stack.enter_context(ByteSource(task.spare)))
            yield source

    def count_holes(self, *, without_tasks: bool = False) -> int:
        """The number of holes of the folder's libraries, or of those that no task is to change."""
        tasks = self.work.tasks if without_tasks else ()
        changing = {task.slimmed.key for task in tasks if task.slimmed is not None}
        slimmed = self.journal.manifest.slimmed
        return sum(entry.holes for key, entry in slimmed.items() if key not in changing)

    def run(self, on_done: OnDone, min_hole: int = LEAST_HOLE) -> list[SlimRow]:
        """Do the work, or foresee what that would do.

        Args:
            on_done: told of each library.
            min_hole: bytes; shorter holes stay in the libraries.

        Raises:
            NegativaError: the manifest or a RECORD can't be written.
            KeyboardInterrupt: what was replaced is in order. Threads may still write to files
                that have no name, so the process should end.
        """
        self._min_hole = min_hole
        journal, spare, work = self.journal, self.options.spare, self.work
        if self.options.dry_run:
            self._apply(on_done)
            return list(together(self.rows))
        self._spares = clear_abandoned(journal.manifest)
        folders = []
        with contextlib.ExitStack() as held:
            # Nothing to cut: the folder of spares may not be mounted.
            if spare is not None and any(task.recipe.spare for task in work.tasks):
                held.enter_context(hold_folder(spare.folder, journal.root))
                folders.append(spare.folder)
            if (aside := self.options.keep_originals) is not None and journal.manifest.run:
                # What a killed run was copying there.
                with refusing(aside, "written", ReconstructError):
                    for part in aside.glob(staged_name(Path("*"), journal.manifest.run).name):
                        part.unlink()
            if work.tasks or work.past or journal.manifest.run or journal.is_empty:
                held.enter_context(journal.at_work((*folders, *self._spares)))
            try:
                self._apply(on_done)
            finally:
                # Also when interrupted: what was replaced must be in order.
                for one in work.past:
                    if journal.manifest.slimmed.get(one.key) is one.entry:
                        journal.note_back(one.key, one.entry, one.originals)
                journal.finish()
            for folder in folders:
                # As long as the manifest names the folder: a run that is killed then leaves none.
                remove_unchecked(folder)
            release(self._spares, journal.root, journal.manifest, folders)
        return list(together(self.rows))

    def _apply(self, on_done: OnDone) -> None:
        """Work in threads, finish the libraries one by one in this thread, and remove the files.

        Args:
            on_done: told of each task.
        """
        # The largest first, so that none is left to run alone at the end.
        tasks = sorted(self.work.tasks, key=lambda task: (-task.size, task.names))
        pool = concurrent.futures.ThreadPoolExecutor(self.options.jobs)
        wait = True
        try:
            pending = {pool.submit(self._make, task): task for task in tasks}
            for future in concurrent.futures.as_completed(pending):
                task = pending[future]
                try:
                    self._finish(task, future.result())
                except CannotCompactError as e:
                    # Libraries without GPU code are not what the user asked about.
                    if e.reason != NO_GPU_CODE:
                        self._add_unchanged(task, SlimStatus.LEFT, e.reason)
                except NegativaError as e:
                    self._add_unchanged(task, SlimStatus.FAILED, str(e))
                on_done(task.size)
        except KeyboardInterrupt:
            # What is begun may take long, and its result is not wanted any more.
            wait = False
            raise
        finally:
            pool.shutdown(wait=wait, cancel_futures=True)
            for hidden in (*map(self._staged, tasks), *map(self._rebuilt, tasks)):
                with contextlib.suppress(OSError):
                    hidden.unlink(missing_ok=True)
                if not wait:
                    # A thread at work has given its file a name.
                    remove_abandoned(hidden)
        self._remove()

    def _staged(self, task: Task) -> Path:
        """A hidden name for the file that is to take the place."""
        return staged_name(self.journal.root / task.name, self.journal.token)

    def _rebuilt(self, task: Task) -> Path:
        """A hidden name for an original that is made again."""
        place = self.journal.root / task.name
        return staged_name(place.with_name(f"{place.name}.original"), self.journal.token)

    def _make(self, task: Task) -> Removal:
        """Make the file that is to take the place of a library, under its hidden name."""
        if not self.options.dry_run:
            self.journal.places(task.names)
        if task.recipe.kind is Kind.REMOVED:
            return self._set_aside(task)
        whole = task.recipe.source
        if task.recipe.kind is not Kind.WHOLE:
            try:
                return self._slim(task)
            except CannotCompactError as e:
                if task.slimmed is None:
                    raise
                whole = e.reason
        self._make_whole(task)
        return Removal(whole=whole, size_after=task.size)

    def _slim(self, task: Task) -> Removal:
        """Make the smaller file, or forecast its size."""
        is_dry = self.options.dry_run
        original: contextlib.AbstractContextManager[ByteSource] = self._original(task)
        if task.spare is not None and is_dry:
            check_pair(task.source, task.spare)
        elif task.spare is not None:
            rebuild_original(task.source, task.spare, self._rebuilt(task))
            original = ByteSource(self._rebuilt(task))
        with original as source:
            planned = self._planned.pop(task.name, None) or plan_library(task.recipe, source)
            return slim_library(
                task.recipe,
                source,
                None if is_dry else self._staged(task),
                Path(task.name).name,
                planned,
                strip=self.options.strip,
                min_hole=self._min_hole,
            )

    def _make_whole(self, task: Task) -> None:
        """Make the original of a slimmed library again, or see whether that can be done."""
        assert task.slimmed is not None, "a library that is whole needs nothing"
        entry, staged, root = task.slimmed.entry, self._staged(task), self.journal.root
        if self.options.dry_run:
            return
        with refusing(root / task.name, "put back", ReconstructError):
            if task.spare is None:
                # A kept original may be that of another folder, too, with other attributes.
                like = next((root / name for name in task.slimmed.results), None)
                # Not a link: a program that writes to the library must not change the kept one.
                copy_file(task.source, staged, like=like, mtime_ns=entry.mtime_ns)
                sha256 = digest_of(staged)
            else:
                sha256 = rebuild_original(task.source, task.spare, staged, entry.mtime_ns)
            if sha256 != entry.original_sha256:
                raise ReconstructError(
                    f"{task.source} changed while it was copied; run the command again"
                )

    def _set_aside(self, task: Task) -> Removal:
        """Keep a file that is to be removed, if asked to."""
        group, aside = self._group_of(task), self.options.keep_originals
        if (sha256 := self.journal.tree.digest(group)) is None:
            raise ReconstructError(f"{task.source}: {UNREADABLE}")
        if aside is not None and not self.options.dry_run:
            token = self.journal.token
            keep_original(task.source, aside / sha256, token, group.state, one_of_many=True)
        return Removal()

    def _group_of(self, task: Task) -> FileGroup:
        group = self.journal.tree.group_of(task.name)
        assert group is not None, "it was found there"
        return group

    def _remove(self) -> None:
        """Remove files that are GPU code. The manifest names all before the first one goes."""
        tree, aside = self.journal.tree, self.options.keep_originals
        entries: dict[str, SlimmedFile] = {}
        for task, group in self._removals:
            sha256 = str(tree.digest(group))
            entries |= {
                name: SlimmedFile(
                    names=(name,),
                    original_sha256=sha256,
                    original_size=group.size,
                    sha256=_NOTHING,
                    size=0,
                    mtime_ns=group.state.mtime_ns,
                    recipe=task.recipe.digest,
                    source=task.recipe.source,
                    gpu_code_removed=group.size,
                    records=self._records_of(name),
                    original=None if aside is None else str(aside / sha256),
                )
                for name in group.names
            }
        if self._unsynced or (entries and aside is not None):
            # One call is faster than one for each of thousands.
            os.sync()
        if entries:
            self.journal.save(slimmed=self.journal.manifest.slimmed | entries)
        for task, group in self._removals:
            try:
                for name in group.names:
                    take_out(tree.root / name, group.state)
            except ReconstructError as e:
                self._add_unchanged(task, SlimStatus.FAILED, str(e))
            else:
                self.rows.append(
                    SlimRow(path=task.name, status=SlimStatus.SLIMMED, before=task.size, after=0)
                )

    def _records_of(self, *names: str) -> tuple[str, ...]:
        """The RECORD files that have a line for a file, below the folder."""
        installers = (one for name in names for one in self.journal.tree.installers(name))
        found = (os.path.relpath(one.record, self.journal.root) for one in installers)
        return tuple(dict.fromkeys(found))

    def _finish(self, task: Task, made: Removal) -> None:
        """Let the names of a library lead to the new file, and note it; or only foresee that."""
        if task.recipe.kind is Kind.REMOVED and not self.options.dry_run:
            self._removals.append((task, self._group_of(task)))
            return
        is_whole, size = made.whole is not None, task.size
        notes: tuple[str, ...] = ()
        detail = task.recipe.why
        if made.useless_for:
            detail = f"keeps no code for {names_of(made.useless_for)}"
        if self.options.dry_run:
            status = SlimStatus.WOULD_UNDO if is_whole else SlimStatus.WOULD_SLIM
        elif is_whole:
            status = SlimStatus.UNDONE
            self._put_back(task)
        else:
            status = SlimStatus.SLIMMED
            notes = self._publish(task, made)
        if task.slimmed is not None and is_whole:
            size, detail = task.slimmed.entry.size, made.whole or None
        self.rows.append(
            SlimRow(
                path=task.name,
                status=status,
                before=size,
                after=made.size_after,
                detail=detail,
                others=len(task.names) - 1,
                useless=bool(made.useless_for),
                notes=notes,
            )
        )

    def _put_back(self, task: Task) -> None:
        """Let the original of a slimmed library take its place again."""
        assert task.slimmed is not None, "its original was made again"
        self._replace(task, self.journal.places(task.names))
        self.journal.note_back(task.slimmed.key, task.slimmed.entry, task.names)

    def _replace(self, task: Task, places: Mapping[Path, FileState | None]) -> None:
        one_of_many = task.slimmed is not None and task.slimmed.entry.is_removed
        replace_all(self._staged(task), places, self.journal.token, one_of_many=one_of_many)
        self._unsynced |= one_of_many
        # The library that has gone needs its spare no more.
        self._spares.update([task.spare] if task.spare is not None else [])

    def _publish(self, task: Task, made: Removal) -> tuple[str, ...]:
        """Let the smaller file take the place of a library; the notes of its entry."""
        journal, file, staged = self.journal, made.made, self._staged(task)
        assert file is not None, "it was written"
        notes = (*made.notes, *file.notes)
        if task.outside:
            links = format_items(task.outside, "hard link", "hard links")
            notes += (f"the original still takes its space: it has {links} outside of the folder",)
        spare = None
        if self.options.spare is not None and isinstance(file, Cut):
            spare = self.options.spare.folder / file.spare.name
        places = journal.places(task.names)
        before = journal.manifest.slimmed
        # A killed run may have noted it, and kept its original, before it replaced it.
        noted = [before[name] for name in task.names if name in before]
        if task.slimmed is not None:
            noted = [task.slimmed.entry]
        old = next((one for one in noted if one.original_sha256 == file.original_sha256), None)
        if task.slimmed is not None and old is None:
            raise ReconstructError(f"{task.source} changed meanwhile; run the command again")
        original = None if old is None else old.original
        replaced = None if task.slimmed is None else task.slimmed.sha256
        if self.options.keep_originals is not None:
            aside = self.options.keep_originals / file.original_sha256
            [state, *_] = places.values()
            made_again = task.source if task.spare is None else self._rebuilt(task)
            keep_original(made_again, aside, journal.token, state)
            # A link to a file changes the file's time of change.
            places = {place: look(place, places[place], by_ctime=False) for place in places}
            original = str(aside)
        status = staged.stat()
        entry = SlimmedFile(
            names=task.names,
            original_sha256=file.original_sha256,
            original_size=task.size,
            sha256=file.sha256,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            recipe=task.recipe.digest,
            source=task.recipe.source,
            gpu_code_removed=made.gpu_code_removed,
            certificate=file.certificate,
            never_loaded=task.recipe.kind is Kind.NEVER_LOADED,
            # Its RECORD may have been removed since.
            records=self._records_of(*task.names) or (() if old is None else old.records),
            original=original,
            spare=None if spare is None else str(spare),
            holes=file.mapped if isinstance(file, Cut) else 0,
            replaced=None if replaced == file.sha256 else replaced,
        )
        # In one step: an interruption saves the manifest, too.
        others = {name: other for name, other in before.items() if name not in task.names}
        journal.save(slimmed={**others, task.name: entry})
        try:
            if spare is not None and isinstance(file, Cut):
                publish(file.spare, spare)
            self._replace(task, places)
        except ReconstructError:
            if not any(is_same_file(state_at(place), FileState.of(status)) for place in places):
                # The library that stays may need that very spare, and be in no manifest.
                self._spares |= spares_of([entry]) - {task.spare}
                journal.save(slimmed=before)
            raise
        return notes

    def _add_unchanged(self, task: Task, status: SlimStatus, detail: str) -> None:
        # The file that is there may be the result of an earlier run, and the task its original.
        size = task.size if task.slimmed is None else task.slimmed.entry.size
        self.rows.append(
            SlimRow.unchanged(task.name, status, size, detail, others=len(task.names) - 1)
        )
