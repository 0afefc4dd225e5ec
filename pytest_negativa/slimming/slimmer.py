"""Slims the libraries of a folder; a process that is killed leaves every library whole.

For each library, the slimmer writes and checks the new file under a hidden name. It keeps the
original if asked to, writes the manifest, and then renames the new file. It updates RECORD files at
the end.
The next run finishes what a killed run left undone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.library import has_gpu_code
from pytest_negativa.installed.origin import Origins
from pytest_negativa.installed.record import RecordLine, record_digest
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.slimming import (
    LeftFile,
    Origin,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.slimming.code_files import forget_stale, reason_of, remove_files
from pytest_negativa.slimming.journal import Journal, Lines
from pytest_negativa.slimming.manifest import folders_of_spares, may_be_kept
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    Kind,
    NotSlimmed,
    Result,
    foresee_library,
    names_of,
    slim_library,
)
from pytest_negativa.slimming.replace import keep_original, link, replace_all
from pytest_negativa.slimming.spares import (
    SparePolicy,
    clear_abandoned,
    discard_unchecked,
    disown,
    hold_folder,
    rebuild,
)
from pytest_negativa.slimming.tree import read_fact, staged_name
from pytest_negativa.slimming.worklist import ANOTHER_PLACE, Task, WorkList
from pytest_negativa.storage.atomic import remove_abandoned

_NOT_KEPT = (
    "no original is kept, because it was slimmed without --keep-originals before; to have one, "
    "install it again, then slim"
)

OnDone = Callable[[int], None]
"""Called with the bytes of each library that is done."""


@dataclass(frozen=True, slots=True)
class SlimOptions:
    """How to slim.

    Attributes:
        strip: drop symbol tables and debug information. A spare keeps them.
        dry_run: report what would be done, and write nothing.
        keep_originals: the folder for the originals; None: keep none.
        spare: where removed code goes, so that it comes back; None: it is lost.
        jobs: how many libraries to slim at a time.
    """

    strip: bool = True
    dry_run: bool = False
    keep_originals: Path | None = None
    spare: SparePolicy | None = None
    jobs: int = 1


class Slimmer:
    """Applies the work list of one folder.

    Args:
        journal: the notes of the run.
        work: what is to be done.
        options: how to do it.

    Attributes:
        rows: what became of each library.
    """

    def __init__(self, journal: Journal, work: WorkList, options: SlimOptions) -> None:
        self.journal = journal
        self.work = work
        self.options = options
        self.rows: list[SlimRow] = []
        self._has_code: dict[str, bool | None] = {}
        self._unchecked: dict[Path, Path] = {}

    @functools.cached_property
    def _origins(self) -> Origins:
        return Origins(self.journal.sites)

    def _origin_of(self, names: Sequence[str]) -> Origin | None:
        found = (self._origins.of(self.journal.root / name) for name in names)
        return next(filter(None, found), None)

    def origins_of_lost(self) -> Iterator[tuple[Path, Origin | None]]:
        """The files that nothing here will bring back, with the distribution of each, if known."""
        if self.options.keep_originals is not None:
            return
        lost = [task.names for task in self.work.tasks if self._may_lose_for_good(task)]
        lost += [group.names for package in self.work.packages for group in package.unused]
        for names in lost:
            yield self.journal.root / names[0], self._origin_of(names)

    def _may_lose_for_good(self, task: Task) -> bool:
        if task.before is not None:
            return False
        recipe = task.recipe
        if recipe.spare is None:
            return self._may_lose(task)
        return recipe.strips_others and self._code_in(task) is False

    def _may_lose(self, task: Task) -> bool:
        """Whether slimming may change a library: most of a site have no GPU code."""
        recipe = task.recipe
        by_code = recipe.kind in (Kind.ARCHS, Kind.NEVER_LOADED) and not recipe.strips_others
        return not by_code or bool(self._code_in(task))

    def _code_in(self, task: Task) -> bool | None:
        """Whether a library has GPU code; None if it can't be read."""
        if task.name not in self._has_code:
            self._has_code[task.name] = read_fact(task.source, has_gpu_code)
        return self._has_code[task.name]

    def run(self, on_done: OnDone) -> list[SlimRow]:
        """Slim the libraries, or foresee what that would do.

        Raises:
            NegativaError: the manifest or a RECORD can't be written.
            KeyboardInterrupt: what was replaced is in order. Threads may still write to files
                that have no name, so the process should end.
        """
        self.rows = [self._with_note(row) for row in self.work.rows]
        if self.options.dry_run:
            self._process(
                self._foresee,
                lambda task, _staged, made: self._add_row(task, SlimStatus.WOULD_SLIM, made),
                on_done,
            )
            for package in self.work.packages:
                self.rows.append(package.row(SlimStatus.WOULD_SLIM, package.unused))
                on_done(package.size)
            return self.rows
        journal = self.journal
        for killed in map(Path, journal.manifest.run_spares):
            clear_abandoned(killed)
        with contextlib.ExitStack() as held:
            # Nothing to cut: the folder of spares may not be mounted.
            spares = {spare.folder for task in self.work.tasks if (spare := task.recipe.spare)}
            for folder in sorted(spares):
                self._hold_spares(folder, held, on_done)
            spares |= folders_of_spares(journal.manifest.slimmed.values())
            try:
                self._run(on_done)
            finally:
                for folder in spares - folders_of_spares(journal.manifest.slimmed.values()):
                    disown(folder, journal.root)
        return self.rows

    def _hold_spares(self, folder: Path, held: contextlib.ExitStack, on_done: OnDone) -> None:
        """Hold a folder of spares; its libraries fail if it can't have the place of one before."""
        journal = self.journal
        try:
            hold = hold_folder(folder, journal.root, journal.held)
            self._unchecked[folder] = held.enter_context(hold)
        except ReconstructError as e:
            if self.options.spare is not None:
                raise
            for task in [*self.work.tasks]:
                if task.recipe.spare is not None and task.recipe.spare.folder == folder:
                    self.work.tasks.remove(task)
                    self._add_failed(task, f"{e}; {ANOTHER_PLACE}")
                    on_done(task.size)

    def _run(self, on_done: OnDone) -> None:
        journal, work = self.journal, self.work
        before = msgspec.json.encode(journal.manifest)
        behind = journal.lines_behind(work.current)
        begun = bool(work.tasks or work.links or work.packages or behind or journal.manifest.run)
        with journal.at_work(self._unchecked) if begun else contextlib.nullcontext():
            self._apply(behind, on_done)
        if not begun and msgspec.json.encode(journal.manifest) != before:
            journal.save()

    def _apply(self, behind: Lines, on_done: OnDone) -> None:
        journal = self.journal
        try:
            if behind:
                journal.write_records({}, behind)
                journal.sites = [Site(site.folder) for site in journal.sites]
            self._forget_stale()
            try:
                self._link_names()
                self._process(self._slim, self._publish, on_done)
                self._remove_files(on_done)
            finally:
                # Also when interrupted: what was replaced must be in order.
                journal.finish(self._lines())
        finally:
            for unchecked in self._unchecked.values():
                discard_unchecked(unchecked)

    def _lines(self) -> dict[str, RecordLine]:
        """The lines of RECORD files for results."""
        return {
            os.path.join(self.journal.root, name): RecordLine(
                record_digest(entry.sha256), str(entry.size)
            )
            for entry in self.journal.manifest.slimmed.values()
            for name in entry.names
            if name in self.work.current
        }

    def _remove_files(self, on_done: OnDone) -> None:
        """Remove the files that are unused GPU code."""
        for package in self.work.packages:
            self.rows += remove_files(
                self.journal,
                package,
                keep_originals=self.options.keep_originals,
                jobs=self.options.jobs,
            )
            on_done(package.size)

    def _with_note(self, row: SlimRow) -> SlimRow:
        """Tell that a library slimmed before without its original kept has none to keep."""
        entry = self.journal.manifest.slimmed.get(row.path)
        if self.options.keep_originals is None or row.status is not SlimStatus.ALREADY:
            return row
        if entry is None or may_be_kept(entry) or entry.spare is not None:
            return row
        return msgspec.structs.replace(row, notes=(*row.notes, _NOT_KEPT))

    def _forget_stale(self) -> None:
        journal = self.journal
        for key in self.work.stale:
            del journal.manifest.slimmed[key]
        for name in [*journal.manifest.left]:
            if journal.tree.group_of(name) is None and journal.tree.covers((name,)):
                del journal.manifest.left[name]
        forget_stale(journal.tree, journal.manifest)

    def _link_names(self) -> None:
        journal = self.journal
        for name, result in self.work.links.items():
            place = journal.root / name
            try:
                [state] = journal.places([name]).values()
                link(journal.root / result, place, state, journal.token)
                self.work.current.add(name)
            except (OSError, NegativaError) as e:
                detail = f"cannot be replaced: {reason_of(e)}"
                size = 0  # it may be gone, and link() failed for that
                with contextlib.suppress(OSError):
                    size = place.lstat().st_size
                self.rows.append(SlimRow.unchanged(name, SlimStatus.FAILED, size, detail))

    def _process(
        self,
        begin: Callable[[Task, Path], Result | NotSlimmed],
        finish: Callable[[Task, Path, Result], None],
        on_done: OnDone,
    ) -> None:
        """Begin all tasks in threads, and finish them one by one in this thread.

        Args:
            begin: what takes long; gets the task and a hidden name for its result.
            finish: what follows if the library is not left as it is.
            on_done: told of each task.
        """
        # The largest first, so that none is left to run alone at the end.
        tasks = sorted(self.work.tasks, key=lambda task: (-task.size, task.names))
        root, token = self.journal.root, self.journal.token
        staged = {task.name: staged_name(root / task.name, token) for task in tasks}
        pool = concurrent.futures.ThreadPoolExecutor(self.options.jobs)
        wait = True
        try:
            pending = {pool.submit(begin, task, staged[task.name]): task for task in tasks}
            for future in concurrent.futures.as_completed(pending):
                task = pending[future]
                try:
                    outcome = future.result()
                    if isinstance(outcome, NotSlimmed):
                        self._leave(task, outcome.reason)
                    else:
                        finish(task, staged[task.name], outcome)
                except NegativaError as e:
                    self._add_failed(task, str(e))
                on_done(task.size)
        except KeyboardInterrupt:
            # What is begun may take long, and its result is not wanted any more.
            wait = False
            raise
        finally:
            pool.shutdown(wait=wait, cancel_futures=True)
            for hidden in (*staged.values(), *map(self._rebuilt_name, tasks)):
                with contextlib.suppress(OSError):
                    hidden.unlink(missing_ok=True)
                if not wait:
                    # A thread at work has given its file a name.
                    remove_abandoned(hidden)

    def _rebuilt_name(self, task: Task) -> Path:
        """A hidden name for an original that is made again."""
        place = self.journal.root / task.name
        return staged_name(place.with_name(f"{place.name}.original"), self.journal.token)

    def _original_of(self, task: Task) -> Path:
        return self._rebuilt_name(task) if task.is_cut else task.source

    def _slim(self, task: Task, staged: Path) -> Result | NotSlimmed:
        if self._has_code.get(task.name) is False and not self._may_lose(task):
            return NotSlimmed(NO_GPU_CODE)
        root, options = self.journal.root, self.options
        try:
            self.journal.places(task.names)
        except ReconstructError:
            # Nothing would be written there.
            if not self._may_lose(task) and self._code_in(task) is False:
                return NotSlimmed(NO_GPU_CODE)
            raise
        original = self._original_of(task)
        if task.is_cut:
            rebuild(task.source, original)
        spare = task.recipe.spare
        return slim_library(
            task.recipe,
            original,
            staged,
            (root / task.name).name,
            strip=options.strip,
            unchecked=None if spare is None else self._unchecked[spare.folder],
        )

    def _foresee(self, task: Task, _staged: Path) -> Result | NotSlimmed:
        name, source = Path(task.name).name, task.source
        # A dry run writes nothing into the folder.
        with contextlib.ExitStack() as stack:
            if task.is_cut:
                source = Path(stack.enter_context(tempfile.TemporaryDirectory()), name)
                rebuild(task.source, source)
            return foresee_library(task.recipe, source, name, strip=self.options.strip)

    def _leave(self, task: Task, reason: str) -> None:
        if task.before is not None:
            self._put_back(task, task.before, reason)
            return
        # Libraries without GPU code are not what the user asked about.
        if reason != NO_GPU_CODE:
            self._add_unchanged(task, SlimStatus.LEFT, task.size, reason)
        group = self.journal.tree.group_of(task.name)
        if group is not None:
            self._note_left(task, group.size, group.mtime_ns, reason)

    def _note_left(self, task: Task, size: int, mtime_ns: int, reason: str) -> None:
        self.journal.manifest.left[task.name] = LeftFile(
            size=size, mtime_ns=mtime_ns, recipe=task.recipe.digest, reason=reason
        )

    def _put_back(self, task: Task, entry: SlimmedFile, reason: str) -> None:
        """Put the original of a library back that lacks code, and of which nothing may go now."""
        status = SlimStatus.WOULD_UNDO
        if not self.options.dry_run:
            status, journal = SlimStatus.UNDONE, self.journal
            like = journal.root / task.name
            journal.put_back(task.names, entry, self._original_of(task), like)
            for key in [k for k, one in journal.manifest.slimmed.items() if one is entry]:
                journal.note_back(key, entry)
            self.work.current.difference_update(task.names)
            self._note_left(task, entry.original_size, entry.mtime_ns, reason)
        row = SlimRow(
            path=task.name,
            status=status,
            before=entry.size,
            after=entry.original_size,
            detail=reason,
            others=len(task.names) - 1,
        )
        self.rows.append(row)

    def _publish(self, task: Task, staged: Path, made: Result) -> None:
        journal = self.journal
        notes = (*made.removal.notes, *made.notes, *self._notes_on(task, made))
        linked: FileState | None = None
        places = journal.places(task.names)
        original = None if task.before is None else task.before.original
        if self.options.keep_originals is not None:
            aside = self.options.keep_originals / made.original_sha256
            known = next(iter(places.values()))
            linked = keep_original(self._original_of(task), aside, journal.token, known)
            # The file that is replaced is another one than the original made again.
            linked = None if task.is_cut else linked
            original = str(aside)
        status, old = staged.stat(), task.before
        rows = journal.rows_before(task.names) if old is None else old.rows
        slimmed = journal.manifest.slimmed
        before = {name: slimmed.pop(name) for name in task.names if name in slimmed}
        journal.manifest.left.pop(task.name, None)
        slimmed[task.name] = SlimmedFile(
            names=task.names,
            original_sha256=made.original_sha256,
            original_size=task.size,
            sha256=made.sha256,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            recipe=task.recipe.digest,
            source=task.recipe.source,
            gpu_code_removed=made.gpu_code_removed,
            certificate=made.certificate,
            never_loaded=task.recipe.kind is Kind.NEVER_LOADED,
            rows=rows,
            original=original,
            notes=notes,
            origin=self._origin_of(task.names) if old is None else old.origin,
            spare=None if made.spare is None else str(made.spare),
        )
        journal.save()
        try:
            replace_all(staged, {p: linked or state for p, state in places.items()}, journal.token)
        except ReconstructError:
            if not any(_is_file(place, status) for place in places):
                del slimmed[task.name]
                slimmed.update(before)
                journal.save()
            raise
        self.work.current.update(task.names)
        self._add_row(task, SlimStatus.SLIMMED, made, notes)

    def _notes_on(self, task: Task, made: Result) -> Iterator[str]:
        if made.spare is not None and self.options.spare is None:
            yield (
                f"its code lies in a spare as before, in {made.spare.parent}; to do without a "
                "spare, pass --keep-originals DIR"
            )
        if task.outside:
            yield (
                "the original still takes its space: it has "
                f"{format_items(task.outside, 'hard link', 'hard links')} outside of the folder"
            )

    def _add_row(
        self, task: Task, status: SlimStatus, made: Result, notes: tuple[str, ...] = ()
    ) -> None:
        detail = task.recipe.why(has_gpu_code=made.removal.plan is not None)
        if useless_for := made.removal.useless_for:
            detail = f"keeps no code for {names_of(useless_for)}"
        row = SlimRow(
            path=task.name,
            status=status,
            before=task.size,
            after=made.size_after,
            detail=detail,
            others=len(task.names) - 1,
            useless=bool(useless_for),
            notes=notes,
        )
        self.rows.append(row)

    def _add_failed(self, task: Task, detail: str) -> None:
        # The file that is there may be the result of an earlier run, and the task its original.
        size = task.size if task.before is None else task.before.size
        self._add_unchanged(task, SlimStatus.FAILED, size, detail)

    def _add_unchanged(self, task: Task, status: SlimStatus, size: int, detail: str) -> None:
        row = SlimRow.unchanged(task.name, status, size, detail)
        self.rows.append(msgspec.structs.replace(row, others=len(task.names) - 1))


def _is_file(path: Path, status: os.stat_result) -> bool:
    """Whether a name leads to the file of that status."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False
