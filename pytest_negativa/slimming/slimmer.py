"""Does what is to be done in a folder, so that whoever kills it leaves every library whole.

For each library: the new file is written and checked under a hidden name, the original put aside
if that is wanted, the manifest written, and then the name goes from the old file to the new one.
RECORD files follow at the end; a run that was killed before is finished by the next one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.installed.record import RecordLine, record_digest, update_record
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.slimming import (
    MANIFEST_VERSION,
    LeftFile,
    RecordRow,
    SlimManifest,
    SlimmedFile,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.rewriting.compact.records import Compacted, Forecast, NotCompacted
from pytest_negativa.slimming.folder_locks import hold_metadata
from pytest_negativa.slimming.manifest import may_be_kept, save_manifest
from pytest_negativa.slimming.recipes import (
    ALL_NEVER_LOADED,
    NO_GPU_CODE,
    NeverLoaded,
    Prepared,
    apply,
    foresee,
)
from pytest_negativa.slimming.replace import dress, link, put_aside, staged_name, take_place
from pytest_negativa.slimming.tree import Tree
from pytest_negativa.slimming.worklist import Todo, Work

_NOT_KEPT = (
    "no original is kept, for it was slimmed without --keep-originals before; to have one, install "
    "it again, then slim"
)

OnDone = Callable[[int], None]
"""Told the bytes of a library that is done with."""


@dataclass(frozen=True, slots=True)
class SlimOptions:
    """How to slim.

    Attributes:
        strip: drop what is never loaded, such as symbol tables and debug information.
        load_check: load each result in a child process before it takes its place.
        dry_run: say what would be done, and write nothing.
        keep_originals: a folder to put originals into; None: they are gone.
        jobs: libraries at a time.
    """

    strip: bool = True
    load_check: bool = True
    dry_run: bool = False
    keep_originals: Path | None = None
    jobs: int = 1


@dataclass(slots=True)
class Slimmer:
    """One folder, its manifest and what is to be done there.

    Attributes:
        tree: the folder as it was found.
        root: where results go: the same folder, or one that is to become a slimmed copy of it.
        manifest: what was done before; kept up to date.
        held: the folders that this process has for itself, this one and others.
    """

    tree: Tree
    root: Path
    manifest: SlimManifest
    todo: Todo
    options: SlimOptions
    held: tuple[Path, ...]
    rows: list[SlimRow] = field(default_factory=list)
    _sites: list[Site] = field(default_factory=list)

    def run(self, on_done: OnDone) -> list[SlimRow]:
        """Do it all.

        Raises:
            NegativaError: the manifest or a RECORD can't be written.
            KeyboardInterrupt: what was replaced is in order, but threads may be at work still, on
                files that nothing leads to. The process is to end.
        """
        self.rows = [self._with_note(row) for row in self.todo.rows]
        if self.options.dry_run:
            self._run_works(on_done)
            return self.rows
        for path in self.tree.leftovers if self.root == self.tree.root else ():
            with contextlib.suppress(OSError):
                path.unlink()
        self._sites = [Site(folder) for folder in self._site_folders()]
        before = self._copy_of_manifest()
        for key in self.todo.stale:
            del self.manifest.slimmed[key]
        for name in [
            n
            for n in self.manifest.left
            if self.tree.covers((n,)) and self.tree.group_of(n) is None
        ]:
            del self.manifest.left[name]
        try:
            self._link_names()
            self._run_works(on_done)
        finally:
            # Also when interrupted: what was replaced is to be in order.
            if self.manifest != before:
                save_manifest(self.root, self.manifest)
            self._update_records()
        return self.rows

    def _with_note(self, row: SlimRow) -> SlimRow:
        """Of what was slimmed before without, no original can be kept any more."""
        if self.options.keep_originals is None or row.status is not SlimStatus.ALREADY:
            return row
        if may_be_kept(self.manifest.slimmed[row.path]):
            return row
        return msgspec.structs.replace(row, notes=(*row.notes, _NOT_KEPT))

    def _site_folders(self) -> Iterator[Path]:
        for site in self.tree.sites:
            if self.root == self.tree.root:
                yield site
            elif not (below := os.path.relpath(site, self.tree.root)).startswith(".."):
                yield self.root / below

    def _copy_of_manifest(self) -> SlimManifest:
        return SlimManifest(
            format_version=MANIFEST_VERSION,
            slimmed=dict(self.manifest.slimmed),
            left=dict(self.manifest.left),
        )

    def _link_names(self) -> None:
        for name, result in self.todo.links.items():
            try:
                link(self.root / result, self.root / name)
            except OSError as e:
                raise ReconstructError(f"{name}: cannot be replaced: {e.strerror}") from e
            self.todo.current.add(name)

    def _run_works(self, on_done: OnDone) -> None:
        # The largest first, so that none is left to run alone at the end.
        works = sorted(self.todo.works, key=lambda work: (-work.size, work.names))
        staged = {work.name: staged_name(self.root / work.name) for work in works}
        pool = concurrent.futures.ThreadPoolExecutor(self.options.jobs)
        wait = True
        try:
            pending = {pool.submit(self._do, work, staged[work.name]): work for work in works}
            for future in concurrent.futures.as_completed(pending):
                work = pending[future]
                try:
                    self._finish(work, staged[work.name], *future.result())
                except NegativaError as e:
                    self._add_failed(work, str(e))
                on_done(work.size)
        except KeyboardInterrupt:
            # What is begun may take long, and nobody wants it any more.
            wait = False
            raise
        finally:
            pool.shutdown(wait=wait, cancel_futures=True)
            for path in staged.values():
                _remove_staged(path)

    def _do(
        self, work: Work, staged: Path
    ) -> tuple[Prepared | None, Compacted | Forecast | NotCompacted | str]:
        prepared = work.recipe.prepare(work.source)
        if isinstance(prepared, str):
            return None, prepared
        if self.options.dry_run:
            return prepared, foresee(prepared, work.source, strip=self.options.strip)
        result = apply(
            prepared,
            work.source,
            staged,
            strip=self.options.strip,
            load_check=self.options.load_check,
        )
        return prepared, result

    def _finish(
        self,
        work: Work,
        staged: Path,
        prepared: Prepared | None,
        result: Compacted | Forecast | NotCompacted | str,
    ) -> None:
        if isinstance(result, Compacted) and prepared is not None:
            self._publish(work, staged, prepared, result)
        elif isinstance(result, Forecast) and prepared is not None:
            self._add_row(
                work, SlimStatus.WOULD_SLIM, result.size_after, _why_slimmed(work, prepared)
            )
        else:
            reason = result.reason if isinstance(result, NotCompacted) else str(result)
            if work.before is not None:
                raise ReconstructError(
                    f"{work.name}: can't be slimmed anew ({reason}), and what is there was slimmed "
                    "in another way; get the original back with negativa slim undo"
                )
            self._add_row(work, SlimStatus.LEFT, work.size, reason)
            group = self.tree.group_of(work.name)
            if group is not None:
                self.manifest.left[work.name] = LeftFile(
                    size=group.size,
                    mtime_ns=group.mtime_ns,
                    recipe=work.recipe.digest,
                    reason=reason,
                )

    def _publish(self, work: Work, staged: Path, prepared: Prepared, result: Compacted) -> None:
        names = [self.root / name for name in work.names]
        notes = [*prepared.notes, *result.notes, *dress(staged, work.source)]
        if work.outside:
            notes.append(
                f"the original takes its space still: {work.outside:,} of its names are elsewhere"
            )
        original = None if work.before is None else work.before.original
        if self.options.keep_originals is not None:
            aside = self.options.keep_originals / result.original_sha256
            put_aside(work.source, aside)
            original = str(aside)
        status = staged.stat()
        rows = self._rows_before(work) if work.before is None else work.before.rows
        for name in work.names:
            self.manifest.slimmed.pop(name, None)
        self.manifest.left.pop(work.name, None)
        self.manifest.slimmed[work.name] = SlimmedFile(
            names=work.names,
            original_sha256=result.original_sha256,
            original_size=work.size,
            sha256=result.sha256,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            recipe=work.recipe.digest,
            source=work.recipe.source,
            gpu_code_removed=prepared.code_removed(result.spared),
            never_loaded=isinstance(work.recipe, NeverLoaded),
            rows=rows,
            original=original,
            notes=tuple(notes),
        )
        save_manifest(self.root, self.manifest)
        try:
            take_place(staged, names)
        except ReconstructError:
            if work.before is None and not any(_is_file(name, status) for name in names):
                del self.manifest.slimmed[work.name]
                save_manifest(self.root, self.manifest)
            raise
        self.todo.current.update(work.names)
        others = len(work.names) - 1
        self.rows.append(
            SlimRow(
                path=work.name,
                status=SlimStatus.SLIMMED,
                before=work.size,
                after=result.size_after,
                why=_why_slimmed(work, prepared),
                others=others,
                notes=tuple(notes),
            )
        )

    def _add_row(self, work: Work, status: SlimStatus, after: int, why: str | None) -> None:
        # Of what was found without being asked for there is nothing to say.
        if why == NO_GPU_CODE:
            return
        self.rows.append(
            SlimRow(
                path=work.name,
                status=status,
                before=work.size,
                after=after,
                why=why,
                others=len(work.names) - 1,
            )
        )

    def _add_failed(self, work: Work, why: str) -> None:
        # What is there may be the result of an earlier run, and the work its kept original.
        size = work.size if work.before is None else work.before.size
        self.rows.append(
            SlimRow(
                path=work.name,
                status=SlimStatus.FAILED,
                before=size,
                after=size,
                why=why,
                others=len(work.names) - 1,
            )
        )

    def _rows_before(self, work: Work) -> tuple[RecordRow, ...]:
        return tuple(
            RecordRow(
                record=os.path.relpath(installed.record, self.root),
                name=name,
                digest=line.digest,
                size=line.size,
            )
            for site in self._sites
            for installed in site.installed()
            for name in work.names
            if (line := installed.libraries.get(os.path.join(self.root, name))) is not None
        )

    def _update_records(self) -> None:
        changes = {
            os.path.join(self.root, name): RecordLine(record_digest(entry.sha256), str(entry.size))
            for entry in self.manifest.slimmed.values()
            for name in entry.names
            if name in self.todo.current
        }
        write_records((self.root, *self.held), self._sites, lambda record: changes)


def _why_slimmed(work: Work, prepared: Prepared) -> str | None:
    is_never = isinstance(work.recipe, NeverLoaded) and prepared.plan is not None
    return ALL_NEVER_LOADED if is_never else None


def _remove_staged(staged: Path) -> None:
    """Remove what is to take a place, or what its writer has of it so far."""
    with contextlib.suppress(OSError):
        for path in (staged, *staged.parent.glob(f"{glob.escape(staged.name)}.*.tmp")):
            path.unlink(missing_ok=True)


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
) -> None:
    """Let RECORD files say what ``changes_of`` has for each, by absolute path of the library.

    Args:
        roots: the folders that this process has for itself.
        sites: where the RECORD files lie.
        changes_of: from a RECORD to what changes there.

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
                        installed.record, site.folder, {path: changes[path] for path in wanted}
                    )
            except NegativaError as e:
                problem = e
    if problem is not None:
        raise problem
