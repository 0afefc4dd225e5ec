"""Slims the libraries of a folder; a process that is killed leaves every library whole.

For each library, the slimmer writes and checks the new file under a hidden name. It keeps the
original if asked to, writes the manifest, and then renames the new file. It updates RECORD files at
the end.
The next run finishes what a killed run left undone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_negativa.errors import FormatError, NegativaError, ReconstructError
from pytest_negativa.gpucode.library import has_gpu_code
from pytest_negativa.installed.origin import Origins
from pytest_negativa.installed.record import RecordLine, record_digest, update_record
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.slimming import (
    LeftFile,
    Origin,
    RecordFile,
    RecordRow,
    SlimManifest,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.slimming.code_files import forget_stale, remove_files
from pytest_negativa.slimming.folder_locks import hold_metadata
from pytest_negativa.slimming.manifest import (
    begin_run,
    digest_of,
    end_run,
    folders_of_spares,
    may_be_kept,
    save_manifest,
    token_of,
)
from pytest_negativa.slimming.named_archs import names_of
from pytest_negativa.slimming.put_back import lines_before, put_back
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    ByArchs,
    Foreseen,
    NeverLoaded,
    NotSlimmed,
    Removal,
    Result,
    foresee_library,
    slim_library,
)
from pytest_negativa.slimming.replace import (
    keep_original,
    link,
    replace_all,
)
from pytest_negativa.slimming.spares import (
    SparePolicy,
    clear_abandoned,
    discard_unchecked,
    forget_tree,
    hold_folder,
    note_tree,
    rebuild,
)
from pytest_negativa.slimming.tree import Tree, staged_name
from pytest_negativa.slimming.worklist import ANOTHER_PLACE, Task, WorkList
from pytest_negativa.storage.atomic import remove_abandoned
from pytest_negativa.storage.shared_folders import refuse_shared

_NOT_KEPT = (
    "no original is kept, because it was slimmed without --keep-originals before; to have one, "
    "install it again, then slim"
)

_Outcome = TypeVar("_Outcome", Result, Foreseen)

OnDone = Callable[[int], None]
"""Called with the bytes of each library that is done."""


@dataclass(frozen=True, slots=True)
class SlimOptions:
    """How to slim.

    Attributes:
        strip: drop symbol tables and debug information. A spare keeps them.
        load_check: load each result in a child process before it takes its place.
        dry_run: report what would be done, and write nothing.
        keep_originals: the folder for the originals; None: keep none.
        spare: where removed code goes, so that it comes back; None: it is lost.
        jobs: how many libraries to slim at a time.
    """

    strip: bool = True
    load_check: bool = True
    dry_run: bool = False
    keep_originals: Path | None = None
    spare: SparePolicy | None = None
    jobs: int = 1


@dataclass(slots=True)
class Slimmer:
    """One folder, its manifest and its work list.

    Attributes:
        tree: the folder as it was found.
        root: where results go: the same folder, or one that becomes a slimmed copy of it.
        manifest: what was done before; the slimmer keeps it up to date.
        work: what is to be done.
        options: how to do it.
        held: the folders that this process has locked, this one and others.
        rows: what became of each library.
        named_root: the name that the root gets at the end; None: the one that it has.
    """

    tree: Tree
    root: Path
    manifest: SlimManifest
    work: WorkList
    options: SlimOptions
    held: tuple[Path, ...]
    rows: list[SlimRow] = field(default_factory=list)
    named_root: Path | None = None
    _token: str = ""
    _undone: list[str] = field(default_factory=list)
    _lines_back: defaultdict[str, dict[str, RecordLine]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _known_sites: list[Site] | None = None
    _known_origins: Origins | None = None
    _without_code: set[str] = field(default_factory=set)
    _unchecked: dict[Path, Path] = field(default_factory=dict)

    @property
    def _sites(self) -> list[Site]:
        if self._known_sites is None:
            self._known_sites = [Site(folder) for folder in self._site_folders()]
        return self._known_sites

    def origin_of(self, task: Task) -> Origin | None:
        """The distribution that brought a library, if one is known."""
        return self._origin_of(task.names) if task.before is None else task.before.origin

    def _origin_of(self, names: Sequence[str]) -> Origin | None:
        if self._known_origins is None:
            self._known_origins = Origins(self._sites)
        found = (self._known_origins.of(self.root / name) for name in names)
        return next(filter(None, found), None)

    def origins_of_lost(self) -> Iterator[tuple[Path, Origin | None]]:
        """The files that nothing here will bring back, with the distribution of each, if known."""
        if self.options.keep_originals is not None:
            return
        for task in self.work.tasks:
            if task.before is None and self._may_lose_for_good(task):
                yield self.root / task.name, self.origin_of(task)
        for package in self.work.packages:
            for group in package.unused:
                yield self.root / group.name, self._origin_of(group.names)

    def _may_lose_for_good(self, task: Task) -> bool:
        recipe = task.recipe
        if recipe.spare is None:
            return self._may_lose(task)
        strips = isinstance(recipe, ByArchs | NeverLoaded) and recipe.strip_others
        return strips and _has_code(task) is False

    def _may_lose(self, task: Task) -> bool:
        """Whether slimming may change a library: most of a site have no GPU code."""
        recipe = task.recipe
        if not isinstance(recipe, ByArchs | NeverLoaded) or recipe.strip_others:
            return True
        has_code = _has_code(task)
        if has_code is False:
            # So that it is not searched again.
            self._without_code.add(task.name)
        return bool(has_code)

    def run(self, on_done: OnDone) -> list[SlimRow]:
        """Slim the libraries, or foresee what that would do.

        Raises:
            NegativaError: the manifest or a RECORD can't be written.
            KeyboardInterrupt: what was replaced is in order. Threads may still write to files
                that have no name, so the process should end.
        """
        self.rows = [self._with_note(row) for row in self.work.rows]
        self._token = token_of(self.manifest)
        if self.options.dry_run:
            self._process(self._foresee, self._add_forecast, on_done)
            for package in self.work.packages:
                count = len(package.unused) + len(package.gone)
                size = package.size + sum(entry.size for entry in package.gone.values())
                self.rows.append(package.row(SlimStatus.WOULD_SLIM, count, size))
                on_done(package.size)
            return self.rows
        for killed in map(Path, self.manifest.run_spares):
            clear_abandoned(killed)
        # Nothing to cut: the folder of spares may not be mounted.
        spares = {spare.folder for _task, spare in self._cuts()}
        root = self.named_root or self.root
        with contextlib.ExitStack() as held:
            for folder in sorted(spares):
                try:
                    self._unchecked[folder] = held.enter_context(hold_folder(folder, root))
                    note_tree(folder, root)
                except ReconstructError as e:
                    if self.options.spare is not None:
                        raise
                    self._fail_those_of(folder, f"{e}; {ANOTHER_PLACE}", on_done)
            spares |= folders_of_spares(self.manifest.slimmed.values())
            try:
                self._run(on_done)
            finally:
                for folder in spares - folders_of_spares(self.manifest.slimmed.values()):
                    forget_tree(folder, root)
        return self.rows

    def _fail_those_of(self, folder: Path, detail: str, on_done: OnDone) -> None:
        """Leave the libraries whose spares can't have the place of those before."""
        tasks = [task for task, spare in self._cuts() if spare.folder == folder]
        for task in tasks:
            self.work.tasks.remove(task)
            self._add_failed(task, detail)
            on_done(task.size)

    def _run(self, on_done: OnDone) -> None:
        before = self._copy_of_manifest()
        work = self.work
        back = self._lines_of_undone()
        begun = bool(work.tasks or work.links or work.packages or back or self.manifest.run)
        if begun:
            self.manifest = begin_run(self.root, self.manifest, self._token, self._unchecked)
        run: str | None = None
        try:
            if back:
                self._write_records(lambda record: back.get(str(record), {}))
                self._known_sites = None
            self._forget_stale()
            try:
                self._link_names()
                self._process(self._slim, self._publish, on_done)
                self._remove_files(on_done)
            finally:
                # Also when interrupted: what was replaced must be in order. Only the entries of
                # originals that are back know the lines of RECORD, so they go last.
                self._update_records()
                for key in self._undone:
                    self.manifest.slimmed.pop(key, None)
        except KeyboardInterrupt:
            # Threads at work may still give their files names, which the next run removes.
            run = self.manifest.run
            raise
        finally:
            for unchecked in self._unchecked.values():
                discard_unchecked(unchecked)
            self.manifest = end_run(self.manifest, run)
            if begun or self.manifest != before:
                save_manifest(self.root, self.manifest, self._token)

    def _remove_files(self, on_done: OnDone) -> None:
        """Remove the files that are unused GPU code."""
        for package in self.work.packages:
            self.rows += remove_files(
                self.tree,
                self.root,
                self.manifest,
                package,
                keep_originals=self.options.keep_originals,
                token=self._token,
                jobs=self.options.jobs,
            )
            on_done(package.size)

    def _with_note(self, row: SlimRow) -> SlimRow:
        """Tell that a library slimmed before without its original kept has none to keep."""
        entry = self.manifest.slimmed.get(row.path)
        if (
            self.options.keep_originals is None
            or row.status is not SlimStatus.ALREADY
            or entry is None
        ):
            return row
        if may_be_kept(entry) or entry.spare is not None:
            return row
        return msgspec.structs.replace(row, notes=(*row.notes, _NOT_KEPT))

    def _forget_stale(self) -> None:
        for key in self.work.stale:
            del self.manifest.slimmed[key]
        gone = [name for name in self.manifest.left if self.tree.group_of(name) is None]
        for name in gone:
            if self.tree.covers((name,)):
                del self.manifest.left[name]
        forget_stale(self.tree, self.manifest)

    def _site_folders(self) -> Iterator[Path]:
        for site in self.tree.sites:
            if self.root == self.tree.root:
                yield site
            elif not (below := os.path.relpath(site, self.tree.root)).startswith(".."):
                yield self.root / below

    def _cuts(self) -> Iterator[tuple[Task, SparePolicy]]:
        """The libraries whose code goes into a spare."""
        for task in self.work.tasks:
            if (spare := task.recipe.spare) is not None:
                yield task, spare

    def _copy_of_manifest(self) -> SlimManifest:
        return msgspec.structs.replace(
            self.manifest,
            slimmed=dict(self.manifest.slimmed),
            left=dict(self.manifest.left),
            records=dict(self.manifest.records),
            removed=dict(self.manifest.removed),
        )

    def _link_names(self) -> None:
        for name, result in self.work.links.items():
            try:
                link(self.root / result, self.root / name, self._state(name), self._token)
                self.work.current.add(name)
            except (OSError, NegativaError) as e:
                reason = e.strerror if isinstance(e, OSError) else e
                detail = f"cannot be replaced: {reason}"
                try:
                    size = (self.root / name).lstat().st_size
                except OSError:
                    size = 0  # it may be gone, and link() failed for that
                self.rows.append(SlimRow.unchanged(name, SlimStatus.FAILED, size, detail))

    def _process(
        self,
        begin: Callable[[Task, Path], _Outcome | NotSlimmed],
        finish: Callable[[Task, Path, _Outcome], None],
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
        staged = {task.name: staged_name(self.root / task.name, self._token) for task in tasks}
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
            for task in tasks:
                _remove_staged(staged[task.name])
                _remove_staged(self._rebuilt_name(task))

    def _rebuilt_name(self, task: Task) -> Path:
        """A hidden name for an original that is made again."""
        place = self.root / task.name
        return staged_name(place.with_name(f"{place.name}.original"), self._token)

    def _original_of(self, task: Task) -> Path:
        return self._rebuilt_name(task) if task.is_cut else task.source

    def _slim(self, task: Task, staged: Path) -> Result | NotSlimmed:
        if task.name in self._without_code:
            return NotSlimmed(NO_GPU_CODE)
        try:
            refuse_shared(*{(self.root / name).parent for name in task.names})
        except ReconstructError:
            # Nothing would be written there.
            if not self._may_lose(task) and task.name in self._without_code:
                return NotSlimmed(NO_GPU_CODE)
            raise
        options = self.options
        original = self._original_of(task)
        if task.is_cut:
            rebuild(task.source, original)
        spare = task.recipe.spare
        return slim_library(
            task.recipe,
            original,
            staged,
            (self.root / task.name).name,
            strip=options.strip,
            load_check=options.load_check,
            unchecked=None if spare is None else self._unchecked[spare.folder],
        )

    def _foresee(self, task: Task, _staged: Path) -> Foreseen | NotSlimmed:
        name = (self.root / task.name).name
        strip = self.options.strip
        if not task.is_cut:
            return foresee_library(task.recipe, task.source, name, strip=strip)
        # A dry run writes nothing into the folder.
        with tempfile.TemporaryDirectory() as folder:
            original = Path(folder, name)
            rebuild(task.source, original)
            return foresee_library(task.recipe, original, name, strip=strip)

    def _add_forecast(self, task: Task, _staged: Path, foreseen: Foreseen) -> None:
        self._add_row(task, SlimStatus.WOULD_SLIM, foreseen.size_after, foreseen.removal)

    def _leave(self, task: Task, reason: str) -> None:
        if task.before is not None:
            self._put_back(task, task.before, reason)
            return
        # Libraries without GPU code are not what the user asked about.
        if reason != NO_GPU_CODE:
            row = SlimRow.unchanged(task.name, SlimStatus.LEFT, task.size, reason)
            self.rows.append(msgspec.structs.replace(row, others=len(task.names) - 1))
        group = self.tree.group_of(task.name)
        if group is not None:
            self._note_left(task, group.size, group.mtime_ns, reason)

    def _note_left(self, task: Task, size: int, mtime_ns: int, reason: str) -> None:
        self.manifest.left[task.name] = LeftFile(
            size=size, mtime_ns=mtime_ns, recipe=task.recipe.digest, reason=reason
        )

    def _put_back(self, task: Task, entry: SlimmedFile, reason: str) -> None:
        """Put the original of a library back that lacks code, and of which nothing may go now."""
        status = SlimStatus.WOULD_UNDO
        if not self.options.dry_run:
            status = SlimStatus.UNDONE
            places = {self.root / name: self._state(name) for name in task.names}
            like = self.tree.root / task.name
            put_back(self._original_of(task), places, entry, self._token, like=like)
            self._undone += [k for k, one in self.manifest.slimmed.items() if one is entry]
            self.work.current.difference_update(task.names)
            self._note_left(task, entry.original_size, entry.mtime_ns, reason)
            for record, path, line in lines_before(self.root, entry):
                self._lines_back[record][path] = line
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

    def _publish(self, task: Task, staged: Path, made: Result) -> None:
        removal = made.removal
        notes = [*removal.notes, *made.notes]
        if made.spare is not None and self.options.spare is None:
            notes.append(
                f"its code lies in a spare as before, in {made.spare.parent}; to do without a "
                "spare, pass --keep-originals DIR"
            )
        if task.outside:
            notes.append(
                "the original still takes its space: it has "
                f"{format_items(task.outside, 'hard link', 'hard links')} outside of the folder"
            )
        linked: FileState | None = None
        original = None if task.before is None else task.before.original
        if self.options.keep_originals is not None:
            aside = self.options.keep_originals / made.original_sha256
            known = self._state(task.name)
            linked = keep_original(self._original_of(task), aside, self._token, known)
            # The file that is replaced is another one than the original made again.
            linked = None if task.is_cut else linked
            original = str(aside)
        status = staged.stat()
        rows = self._rows_before(task) if task.before is None else task.before.rows
        self._remember_records(rows)
        slimmed = self.manifest.slimmed
        before = {name: slimmed.pop(name) for name in task.names if name in slimmed}
        self.manifest.left.pop(task.name, None)
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
            never_loaded=isinstance(task.recipe, NeverLoaded),
            rows=rows,
            original=original,
            notes=tuple(notes),
            origin=self.origin_of(task),
            spare=None if made.spare is None else str(made.spare),
        )
        save_manifest(self.root, self.manifest, self._token)
        places = {self.root / name: linked or self._state(name) for name in task.names}
        try:
            replace_all(staged, places, self._token)
        except ReconstructError:
            if not any(_is_file(place, status) for place in places):
                del slimmed[task.name]
                slimmed.update(before)
                save_manifest(self.root, self.manifest, self._token)
            raise
        self.work.current.update(task.names)
        self._add_row(task, SlimStatus.SLIMMED, made.size_after, removal, tuple(notes))

    def _state(self, name: str) -> FileState | None:
        """The state of the file to replace; None if a copy grows where none is."""
        group = self.tree.group_of(name) if self.root == self.tree.root else None
        return None if group is None else group.state

    def _add_row(
        self,
        task: Task,
        status: SlimStatus,
        after: int,
        removal: Removal,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.rows.append(
            SlimRow(
                path=task.name,
                status=status,
                before=task.size,
                after=after,
                detail=_why_slimmed(task, removal),
                others=len(task.names) - 1,
                useless=bool(removal.useless_for),
                notes=notes,
            )
        )

    def _add_failed(self, task: Task, detail: str) -> None:
        # The file that is there may be the result of an earlier run, and the task its original.
        size = task.size if task.before is None else task.before.size
        row = SlimRow.unchanged(task.name, SlimStatus.FAILED, size, detail)
        self.rows.append(msgspec.structs.replace(row, others=len(task.names) - 1))

    def _rows_before(self, task: Task) -> tuple[RecordRow, ...]:
        return tuple(
            RecordRow(
                record=os.path.relpath(installed.record, self.root),
                name=name,
                digest=line.digest,
                size=line.size,
            )
            for site in self._sites
            for installed in site.installed()
            for name in task.names
            if (line := installed.libraries.get(os.path.join(self.root, name))) is not None
        )

    def _remember_records(self, rows: Sequence[RecordRow]) -> None:
        """Note what RECORD files are, unless a library that is slimmed has changed them."""
        changed = {row.record for entry in self.manifest.slimmed.values() for row in entry.rows}
        for name in {row.record for row in rows} - changed:
            path = self.root / name
            if (sha256 := digest_of(path)) is not None:
                self.manifest.records[name] = RecordFile(
                    sha256=sha256, mtime_ns=path.stat().st_mtime_ns
                )

    def _update_records(self) -> None:
        changes = {
            os.path.join(self.root, name): RecordLine(record_digest(entry.sha256), str(entry.size))
            for entry in self.manifest.slimmed.values()
            for name in entry.names
            if name in self.work.current
        }
        self._write_records(lambda record: {**changes, **self._lines_back.get(str(record), {})})

    def _write_records(self, changes_of: Callable[[Path], Mapping[str, RecordLine]]) -> None:
        write_records((self.root, *self.held), self._sites, changes_of, self._token)

    def _lines_of_undone(self) -> dict[str, dict[str, RecordLine]]:
        """The lines that RECORD files lack because a run was killed after it put originals back."""
        undone = [
            entry
            for entry in self.manifest.slimmed.values()
            if self.tree.covers(entry.names) and self.work.current.isdisjoint(entry.names)
        ]
        found = self.tree.recorded({name for entry in undone for name in entry.names})
        lines: defaultdict[str, dict[str, RecordLine]] = defaultdict(dict)
        for entry in undone:
            slim = record_digest(entry.sha256)
            if any(slim in found.get(name, ()) for name in entry.names):
                for record, path, line in lines_before(self.root, entry):
                    lines[record][path] = line
        return lines


def _has_code(task: Task) -> bool | None:
    """Whether a library has GPU code; None if it can't be read."""
    try:
        return has_gpu_code(task.source)
    except FormatError:
        return None


def _why_slimmed(task: Task, removal: Removal) -> str | None:
    if removal.useless_for:
        return f"keeps no code for {names_of(removal.useless_for)}"
    if isinstance(task.recipe, NeverLoaded):
        return task.recipe.why(has_gpu_code=removal.plan is not None)
    return None


def _remove_staged(staged: Path) -> None:
    """Remove a staged file, or the part of it that was written."""
    with contextlib.suppress(OSError):
        staged.unlink(missing_ok=True)
    remove_abandoned(staged)


def _is_file(path: Path, status: os.stat_result) -> bool:
    """Whether a name leads to the file of that status."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def write_records(
    roots: Sequence[Path],
    sites: Sequence[Site],
    changes_of: Callable[[Path], Mapping[str, RecordLine]],
    token: str,
) -> None:
    """Change the rows of libraries in RECORD files.

    Args:
        roots: the folders that this process has locked.
        sites: where the RECORD files lie.
        changes_of: from a RECORD to the new rows, by absolute path of the library.
        token: of the run.

    Raises:
        StoreError: one can't be read or written; the others are.
    """
    problem: NegativaError | None = None
    for site in sites:
        for installed in site.installed():
            changes = changes_of(installed.record)
            wanted = installed.libraries.keys() & changes.keys()
            if not wanted:
                continue
            try:
                with hold_metadata(installed.record.parent, *roots):
                    update_record(
                        installed.record,
                        site.folder,
                        {path: changes[path] for path in wanted},
                        staged_name(installed.record, token),
                    )
            except NegativaError as e:
                problem = e
    if problem is not None:
        raise problem
