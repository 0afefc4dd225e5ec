"""``negativa slim``: slims the libraries of folders. A killed process leaves every library whole.

For each library, the slimmer writes and checks the new file under a hidden name. It keeps the
original if asked to, writes the manifest, and then renames the new file. It updates RECORD files at
the end. The next run finishes what a killed run left undone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.source import ByteSource, read_fact
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.slimming import (
    PROBLEMS,
    UNMET,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.rewriting.compact.rebuild import read_note
from pytest_negativa.rewriting.compact.records import CannotCompactError, Cut
from pytest_negativa.slimming.atomic_replacement import (
    is_same_file,
    keep_original,
    look,
    replace_all,
    state_at,
)
from pytest_negativa.slimming.code_files import remove_files
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
    OnProgress,
    SlimOptions,
    SlimReport,
    SlimRequest,
    refuse_contradictions,
)
from pytest_negativa.slimming.spares import (
    LEAST_HOLE,
    clear_abandoned,
    find_spare,
    hold_folder,
    least_hole,
    publish,
    rebuild,
    release,
    remove_unchecked,
)
from pytest_negativa.slimming.tree import roots_of, staged_name
from pytest_negativa.slimming.undo import Slimmed
from pytest_negativa.slimming.worklist import Task, WorkList, find_work
from pytest_negativa.storage.atomic import remove_abandoned

OnDone = Callable[[int], None]
"""Called with the bytes of each library that is done."""


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
        if request.require:
            # They won't become what the lock wants.
            known = (row for folder in work for row in folder.rows)
            missed = (*unmet, *(row for row in known if row.status in PROBLEMS | UNMET))
            if missed:
                return SlimReport(missed, stopped=True)
        return _apply(work, unmet, request.options, on_progress)


def _apply(
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
    begun: dict[Path, Iterator[Removal]] = {}
    slimmers = [Slimmer(folder, options, begun) for folder in folders]
    total = sum(task.size for folder in folders for task in folder.tasks) + sum(
        package.size for folder in folders for package in folder.packages
    )
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, total)

    count(0)
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
        listed=frozenset(glob for folder in folders for glob in folder.listed),
        opened=tuple(name for folder in folders for name in folder.opened),
    )


class Slimmer:
    """Applies the work list of one folder.

    Args:
        work: what is to be done.
        options: how to do it.
        begun: by path, see ``_steps``; the planned libraries are open.

    Attributes:
        rows: what became of each library.
    """

    def __init__(
        self, work: WorkList, options: SlimOptions, begun: dict[Path, Iterator[Removal]]
    ) -> None:
        self.journal = work.journal
        self.work = work
        self.options = options
        self.rows = work.rows
        self._min_hole = LEAST_HOLE
        self._begun = begun
        # Of slimmed libraries.
        self._holes: dict[SlimmedFile, int] = {}
        # Those that libraries had before.
        self._spares: set[Path] = set()

    def foresee_holes(self) -> Iterator[int]:
        """Sizes in bytes of the holes that the libraries of the work list could have."""
        tasks = [task for task in self.work.tasks if task.recipe.spare is not None]
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            for sizes in pool.map(self._begin, tasks):
                yield from sizes

    def _begin(self, task: Task) -> Sequence[int]:
        """Plan a library, for the sizes of its holes; () if the work on it will tell why not."""
        steps = self._steps(task)
        try:
            planned = next(steps)
        except NegativaError:
            return ()
        # Each job takes up to eight descriptors. An original that is made again is another file.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not task.is_cut and len(self._begun) < (limit - 8 * self.options.jobs) // 2:
            self._begun[self.journal.root / task.name] = steps
        return planned.hole_sizes

    def count_holes(self, *, without_tasks: bool = False) -> int:
        """The number of holes of the folder's libraries, or of those that no task is to change."""
        tasks = self.work.tasks if without_tasks else ()
        changing = {task.slimmed.key for task in tasks if task.slimmed is not None}
        entries = [
            entry
            for key, entry in self.journal.manifest.slimmed.items()
            if entry.spare is not None and key not in changing
        ]
        for entry in entries:
            if entry not in self._holes:
                note = read_fact(self.journal.root / entry.names[0], read_note)
                self._holes[entry] = 0 if note is None else len(note.holes)
        return sum(self._holes[entry] for entry in entries)

    def run(self, on_done: OnDone, min_hole: int) -> list[SlimRow]:
        """Slim the libraries, or foresee what that would do.

        Args:
            on_done: told of each library.
            min_hole: bytes; shorter holes stay in the libraries.

        Raises:
            NegativaError: the manifest or a RECORD can't be written.
            KeyboardInterrupt: what was replaced is in order. Threads may still write to files
                that have no name, so the process should end.
        """
        self._min_hole = min_hole
        if self.options.dry_run:
            self._process(
                lambda task, made: self._add_row(task, SlimStatus.WOULD_SLIM, made),
                on_done,
            )
            for package in self.work.packages:
                self.rows.append(package.row(SlimStatus.WOULD_SLIM, package.unused))
                on_done(package.size)
            return self.rows
        journal, spare, work = self.journal, self.options.spare, self.work
        self._spares = clear_abandoned(journal.manifest)
        folders = []
        with contextlib.ExitStack() as held:
            # Nothing to cut: the folder of spares may not be mounted.
            if spare is not None and any(task.recipe.spare for task in work.tasks):
                held.enter_context(hold_folder(spare.folder, journal.root))
                folders.append(spare.folder)
            if work.tasks or work.packages or work.past or journal.manifest.run:
                held.enter_context(journal.at_work((*folders, *self._spares)))
            self._apply(on_done)
            for folder in folders:
                # As long as the manifest names the folder: a run that is killed then leaves none.
                remove_unchecked(folder)
            release(self._spares, journal.root, journal.manifest, folders)
        return self.rows

    def _apply(self, on_done: OnDone) -> None:
        journal = self.journal
        try:
            self._process(self._publish, on_done)
            for package in self.work.packages:
                self.rows += remove_files(journal, package, self.options)
                on_done(package.size)
        finally:
            # Also when interrupted: what was replaced must be in order.
            for key, entry in self.work.past.items():
                if journal.manifest.slimmed.get(key) is entry:
                    journal.note_back(key, entry)
            journal.finish()

    def _process(self, finish: Callable[[Task, Removal], None], on_done: OnDone) -> None:
        """Slim in threads, and finish the libraries one by one in this thread.

        Args:
            finish: called for each library that gets smaller.
            on_done: told of each task.
        """
        # The largest first, so that none is left to run alone at the end.
        tasks = sorted(self.work.tasks, key=lambda task: (-task.size, task.names))
        pool = concurrent.futures.ThreadPoolExecutor(self.options.jobs)
        wait = True
        try:
            pending = {pool.submit(self._slim, task): task for task in tasks}
            for future in concurrent.futures.as_completed(pending):
                task = pending[future]
                try:
                    try:
                        made = future.result()
                    except CannotCompactError as e:
                        self._leave(task, e.reason)
                    else:
                        finish(task, made)
                except NegativaError as e:
                    self._add_unchanged(task, SlimStatus.FAILED, str(e))
                on_done(task.size)
        except KeyboardInterrupt:
            # What is begun may take long, and its result is not wanted any more.
            wait = False
            raise
        finally:
            pool.shutdown(wait=wait, cancel_futures=True)
            for hidden in (*map(self._staged, tasks), *map(self._rebuilt_name, tasks)):
                with contextlib.suppress(OSError):
                    hidden.unlink(missing_ok=True)
                if not wait:
                    # A thread at work has given its file a name.
                    remove_abandoned(hidden)

    def _staged(self, task: Task) -> Path:
        """A hidden name for the smaller file."""
        return staged_name(self.journal.root / task.name, self.journal.token)

    def _rebuilt_name(self, task: Task) -> Path:
        """A hidden name for an original that is made again."""
        place = self.journal.root / task.name
        return staged_name(place.with_name(f"{place.name}.original"), self.journal.token)

    def _original_of(self, task: Task) -> Path:
        return self._rebuilt_name(task) if task.is_cut else task.source

    def _slim(self, task: Task) -> Removal:
        is_dry = self.options.dry_run
        if not is_dry:
            self.journal.places(task.names)
        if (steps := self._begun.pop(self.journal.root / task.name, None)) is None:
            steps = self._steps(task, None if is_dry else self._original_of(task))
            next(steps)
        return next(steps)

    def _steps(self, task: Task, place: Path | None = None) -> Iterator[Removal]:
        """Plan a library, then make the smaller file; meanwhile it stays open.

        Args:
            task, place: see ``_at_hand``.
        """
        with self._at_hand(task, place) as source:
            yield (planned := plan_library(task.recipe, source))
            yield slim_library(
                task.recipe,
                source,
                None if self.options.dry_run else self._staged(task),
                Path(task.name).name,
                planned,
                strip=self.options.strip,
                min_hole=self._min_hole,
            )

    @contextlib.contextmanager
    def _at_hand(self, task: Task, place: Path | None = None) -> Iterator[ByteSource]:
        """The original of a library, open for reading.

        Args:
            task: the library.
            place: where to make the original of a cut library; None: in a temporary folder.
        """
        with contextlib.ExitStack() as stack:
            original = task.source
            if task.is_cut:
                name = Path(task.name).name
                original = place or Path(stack.enter_context(tempfile.TemporaryDirectory()), name)
                rebuild(task.source, original)
            yield stack.enter_context(ByteSource(original))

    def _leave(self, task: Task, reason: str) -> None:
        if task.slimmed is not None:
            self._put_back(task, task.slimmed, reason)
        # Libraries without GPU code are not what the user asked about.
        elif reason != NO_GPU_CODE:
            self._add_unchanged(task, SlimStatus.LEFT, reason)

    def _put_back(self, task: Task, slimmed: Slimmed, reason: str) -> None:
        """Put the original of a library back that lacks code, and of which nothing may go now."""
        entry, status, journal = slimmed.entry, SlimStatus.WOULD_UNDO, self.journal
        if not self.options.dry_run:
            status, like = SlimStatus.UNDONE, journal.root / slimmed.results[0]
            aside = None if task.is_cut else task.source
            before = [find_spare(task.source)] if task.is_cut else []
            journal.put_back(task.names, entry, aside, like)
            self._spares.update(before)
            journal.note_back(slimmed.key, entry)
        self.rows.append(
            SlimRow(
                path=task.name,
                status=status,
                before=entry.size,
                after=entry.original_size,
                detail=reason,
                others=len(task.names) - 1,
            )
        )

    def _publish(self, task: Task, made: Removal) -> None:
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
        old = [one.original for one in noted if one.original_sha256 == file.original_sha256]
        replaced = None
        if task.slimmed is not None:
            old, replaced = [task.slimmed.entry.original], task.slimmed.sha256
        original = next(iter(old), None)
        if self.options.keep_originals is not None:
            aside = self.options.keep_originals / file.original_sha256
            [state, *_] = places.values()
            keep_original(self._original_of(task), aside, journal.token, state)
            # A link to a file changes the file's time of change.
            places = {place: look(place, places[place], by_ctime=False) for place in places}
            original = str(aside)
        status = staged.stat()
        installers = (one for name in task.names for one in journal.tree.installers(name))
        records = tuple(dict.fromkeys(os.path.relpath(i.record, journal.root) for i in installers))
        reinstall = next(filter(None, map(journal.tree.reinstall_command, task.names)), None)
        if task.slimmed is not None:
            # Its RECORD may have been removed since.
            records = records or task.slimmed.entry.records
            reinstall = reinstall or task.slimmed.entry.reinstall
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
            records=records,
            original=original,
            notes=notes,
            reinstall=reinstall,
            spare=None if spare is None else str(spare),
            replaced=None if replaced == file.sha256 else replaced,
        )
        # In one step: an interruption saves the manifest, too.
        others = {name: other for name, other in before.items() if name not in task.names}
        journal.change({**others, task.name: entry})
        try:
            if spare is not None and isinstance(file, Cut):
                publish(file.spare, spare)
                self._holes[entry] = file.mapped
            # Once another file has its place, the library needs its spare no more.
            let_go = [find_spare(task.source)] if task.is_cut else []
            replace_all(staged, places, journal.token)
            self._spares.update(let_go)
        except ReconstructError:
            if not any(is_same_file(state_at(place), FileState.of(status)) for place in places):
                self._spares |= spares_of([entry])
                journal.change(before)
            raise
        self._add_row(task, SlimStatus.SLIMMED, made, notes)

    def _add_row(
        self, task: Task, status: SlimStatus, made: Removal, notes: tuple[str, ...] = ()
    ) -> None:
        detail = task.recipe.why(has_gpu_code=made.plan is not None)
        if useless_for := made.useless_for:
            detail = f"keeps no code for {names_of(useless_for)}"
        self.rows.append(
            SlimRow(
                path=task.name,
                status=status,
                before=task.size,
                after=made.size_after,
                detail=detail,
                others=len(task.names) - 1,
                useless=bool(useless_for),
                notes=notes,
                moved=task.recipe.is_moving,
            )
        )

    def _add_unchanged(self, task: Task, status: SlimStatus, detail: str) -> None:
        # The file that is there may be the result of an earlier run, and the task its original.
        size = task.size if task.slimmed is None else task.slimmed.entry.size
        self.rows.append(
            SlimRow.unchanged(task.name, status, size, detail, others=len(task.names) - 1)
        )
