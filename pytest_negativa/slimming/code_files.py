"""Files that are GPU code themselves: slimming removes them whole, keeps RECORD's rows.

An empty file in the place would be worse: a program that finds it reads wrong content, whereas one
that finds no file says so, or gets it from elsewhere. RECORD keeps the rows, so that the installer
still knows of the files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.errors import NegativaError, ReconstructError, refusing
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.installed.record import record_digest
from pytest_negativa.installed.sites import SITE_NAMES
from pytest_negativa.models.file_kinds import (
    CODE_SUFFIXES,
    is_loadable,
)
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.slimming import (
    RemovedFile,
    SlimManifest,
    SlimRow,
    SlimStatus,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import normalized
from pytest_negativa.slimming.atomic_replacement import copy_file, keep_original, take, take_out
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.recipes import Recipe
from pytest_negativa.slimming.request import SlimOptions
from pytest_negativa.slimming.slimmed import UNREADABLE
from pytest_negativa.slimming.tree import FileGroup, Tree, staged_name
from pytest_negativa.storage.shared_folders import make_folder
from pytest_negativa.storage.system import head_of

_NOT_AGAIN = (
    "removed before, by another lock or for other archs, and this one may keep them: put them back "
    "(negativa slim undo), or install them again, then slim"
)


@dataclass(slots=True)
class Package:
    """The files that are GPU code in one package or folder.

    Attributes:
        name: below the root, for people.
        source: what tells which of them no program needs.
        unused: those that go.
        gone: names of those that an earlier run removed, and its entries.
        kept: those that stay.
        note: why files stay that the lock has as unused.
        problem: why nothing is removed.
    """

    name: str
    source: str
    unused: list[FileGroup] = field(default_factory=list)
    gone: dict[str, RemovedFile] = field(default_factory=dict)
    kept: list[FileGroup] = field(default_factory=list)
    note: str | None = None
    problem: str | None = None

    @property
    def size(self) -> int:
        """Bytes that go."""
        return _size_of(self.unused)

    def row(self, status: SlimStatus, removed: Collection[FileGroup]) -> SlimRow:
        """A row for all files together, of which these are gone beside those that were."""
        gone = _size_of(removed) + sum(entry.size for entry in self.gone.values())
        kept = _size_of(self.kept)
        count = len(removed) + len(self.gone)
        return SlimRow(
            path=self.name,
            status=status,
            before=gone + kept,
            after=kept,
            detail=f"{count:,} of {format_items(count + len(self.kept), 'file', 'files')} removed",
            notes=() if self.note is None else (self.note,),
        )

    def row_before(self, *, spare: bool) -> SlimRow | None:
        """The row that is known before the work; None if there is work, or nothing to tell.

        Args:
            spare: code goes into a spare, so no file goes.
        """
        if spare:
            detail = (
                f"{format_items(len(self.unused), 'unused file', 'unused files')} of GPU code "
                f"({format_bytes(self.size)}): a spare brings pages back, and no files; slim their "
                "folder without --spare to remove them"
            )
            row = SlimRow.unchanged(self.name, SlimStatus.LEFT, self.size, detail)
            return row if self.unused else None
        kept = _size_of(self.kept)
        if self.problem is not None:
            return SlimRow.unchanged(self.name, SlimStatus.FAILED, self.size + kept, self.problem)
        if self.unused or not (self.gone or self.note):
            return None
        if self.gone:
            return self.row(SlimStatus.ALREADY, ())
        return SlimRow.unchanged(self.name, SlimStatus.DIFFERENT, kept, self.note)


def _size_of(groups: Iterable[FileGroup]) -> int:
    return sum(group.size for group in groups)


def package_of(name: str) -> str:
    """The package, or the uppermost folder, that a file below a root lies in."""
    *folders, _ = name.split("/")
    start = next((i + 1 for i, folder in enumerate(folders) if folder in SITE_NAMES), 0)
    return "/".join(folders[: start + 1] or ".") + "/"


def packages_by_archs(
    tree: Tree,
    manifest: SlimManifest,
    recipe: Recipe,
) -> list[Package]:
    """The files below a folder, and which of them no device of a recipe can load.

    Args:
        tree, manifest: of the folder.
        recipe: what stays.
    """
    source = recipe.source
    packages = removed_packages(tree, manifest, source)
    groups = () if tree.partial else tree.groups
    for group in (one for one in groups if one.name.endswith(CODE_SUFFIXES)):
        path = tree.root / group.name
        head = head_of(path)
        if not is_loadable(head):
            continue
        name = package_of(group.name)
        package = packages.setdefault(name, Package(name, source))
        # Under another name the file may be anything to a program, or a backup.
        has_others = not all(name.endswith(CODE_SUFFIXES) for name in group.names)
        is_kept = has_others or recipe.keeps_file(path, head)
        (package.kept if is_kept else package.unused).append(group)
    for package in packages.values():
        if any(entry.source != source for entry in package.gone.values()):
            package.problem = _NOT_AGAIN
    return list(packages.values())


def removed_packages(tree: Tree, manifest: SlimManifest, source: str = "") -> dict[str, Package]:
    """The packages below a folder that lack files because of slimming, by name.

    Args:
        tree, manifest: of the folder.
        source: see ``Package``.
    """
    packages: dict[str, Package] = {}
    for name, entry in manifest.removed.items() if not tree.partial else ():
        package = packages.setdefault(package_of(name), Package(package_of(name), source))
        package.gone[name] = entry
    return packages


def packages_by_lock(
    tree: Tree,
    manifest: SlimManifest,
    locked: LockedLibrary,
    source: str,
    options: SlimOptions,
) -> Iterator[Package]:
    """The files of a lock's distribution, for each folder that it is installed in.

    Args:
        tree, manifest: of the folder.
        locked: what stays.
        source: the lock in words.
        options: without a spare, files stay if their content is not that of RECORD.
    """
    if tree.partial:
        return
    wanted = normalized(locked.distribution or "")
    found = (one for site in tree.sites for one in site.installed if one.code_files)
    named = [one for one in found if normalized(one.name) == wanted]
    same = [one for one in named if one.code_digest == locked.sha256]
    kept = {str(code.detail) for code in locked.kept}
    for one in same:
        # The names in the lock of the files here.
        names = {os.path.relpath(one.site / name, tree.root): name for name in one.code_files}
        package = Package(f"{one.name} {one.version}", source)
        away = manifest.removed.keys() & {name for name in names if tree.group_of(name) is None}
        package.gone = {name: manifest.removed[name] for name in away}
        if any(names[name] in kept for name in away):
            package.problem = _NOT_AGAIN
        for group in dict.fromkeys(filter(None, map(tree.group_of, names))):
            # Any name of the file may be what a program opens.
            is_kept = any(names.get(name) in kept or name not in names for name in group.names)
            head = head_of(tree.root / group.name)
            is_kept = is_kept or not is_loadable(head)
            (package.kept if is_kept else package.unused).append(group)
        checked = package.unused if options.spare is None else ()
        lines = one.code_files
        changed = {
            group: None
            for group, sha256 in tree.digests(checked, options.jobs).items()
            if sha256 is None
            or {lines[names[name]].digest for name in group.names} != {record_digest(sha256)}
        }
        if changed:
            package.unused = [group for group in package.unused if group not in changed]
            package.kept += changed
            package.note = (
                f"{format_items(len(changed), 'file', 'files')} left: another content than in "
                f"RECORD, so not what was proved: {next(iter(changed)).name}"
            )
        yield package
    if named and not same:
        note = (
            f"not the files that were proved (of {locked.distribution} {locked.version}); left as "
            "they are: install these, or prove and lock the ones here"
        )
        yield Package(f"{named[0].name} {named[0].version}", source, note=note)


def change_files(journal: Journal, package: Package, options: SlimOptions) -> Iterator[SlimRow]:
    """Remove the files of a package that no program needs; without any, those gone come back.

    Args:
        journal: the notes of the run.
        package: what goes.
        options: as it has them.

    Yields:
        The rows of the package.
    """
    if not package.unused:
        return _put_back(journal, package, dry_run=options.dry_run)
    if options.dry_run:
        return iter([package.row(SlimStatus.WOULD_SLIM, package.unused)])
    return _remove(journal, package, options)


def _remove(journal: Journal, package: Package, options: SlimOptions) -> Iterator[SlimRow]:
    """Remove the unused files of a package. The manifest names them before the first one goes.

    Yields:
        A row for the package if a file went, and one if a file can't be read, kept or removed. It
        and those behind it stay.
    """
    tree, root, removed = journal.tree, journal.root, journal.manifest.removed
    gone: list[FileGroup] = []
    keep_originals, problem = options.keep_originals, None
    try:
        for group, sha256 in tree.digests(package.unused, options.jobs).items():
            path, aside = root / group.name, None
            if sha256 is None:
                raise ReconstructError(f"{path}: {UNREADABLE}")
            journal.places(group.names)
            if keep_originals is not None:
                aside = keep_originals / sha256
                keep_original(path, aside, journal.token, group.state, one_of_many=True)
            with refusing(path, "read", ReconstructError):
                mode = stat.S_IMODE(path.lstat().st_mode)
            entry = RemovedFile(
                sha256=sha256,
                size=group.size,
                mtime_ns=group.state.mtime_ns,
                mode=mode,
                source=package.source,
                original=None if aside is None else str(aside),
            )
            for name in group.names:
                record = tree.records(name).get(record_digest(sha256))
                removed[name] = replace(entry, record=record and os.path.relpath(record, root))
        if keep_originals is not None:
            # One call is faster than one for each of thousands.
            os.sync()
        journal.save()
        for group in package.unused:
            for name in group.names:
                take_out(root / name, group.state)
            gone.append(group)
    except NegativaError as e:
        problem = str(e)
    finally:
        for name in [name for name in removed if os.path.lexists(root / name)]:
            del removed[name]
    if gone:
        yield package.row(SlimStatus.SLIMMED, gone)
    if problem is not None:
        yield SlimRow.unchanged(package.name, SlimStatus.FAILED, _size_of(package.kept), problem)


def _put_back(journal: Journal, package: Package, *, dry_run: bool) -> Iterator[SlimRow]:
    """Put back the files of a package that slimming removed, and take them out of the manifest.

    See ``manifest_of`` for those that stay away.

    Yields:
        A row for those that are back, and one for those that can't be.
    """
    tree, gone = journal.tree, package.gone
    failed: dict[str, str] = {}
    for name, entry in gone.items():
        try:
            _put_one_back(tree.root / name, entry, journal.token, dry_run=dry_run)
        except NegativaError as e:
            failed[name] = str(e)
    if failed:
        first, *others = failed.values()
        more = f" (and {format_items(len(others), 'more file', 'more files')})" if others else ""
        detail = f"cannot be put back: {first}{more}; {tree.how_to_reinstall(*failed)}"
        yield SlimRow.unchanged(package.name, SlimStatus.FAILED, 0, detail)
    back = gone.keys() - failed
    if back:
        yield SlimRow(
            path=package.name,
            status=SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE,
            before=0,
            after=sum(gone[name].size for name in back),
            detail=format_items(len(back), "file", "files"),
        )
    if not dry_run:
        # The entries are forgotten next. One call is faster than one for each of thousands.
        os.sync()
        for name in back:
            del journal.manifest.removed[name]


def _put_one_back(path: Path, entry: RemovedFile, token: str, *, dry_run: bool) -> None:
    if entry.original is None:
        raise ReconstructError(f"{path}: it was removed, and was not kept")
    aside = Path(entry.original)
    if digest_of(aside) != entry.sha256:
        raise ReconstructError(f"{path}: {aside} is gone, or no longer that file")
    if dry_run:
        return
    if path.parent.resolve() != path.parent:
        raise ReconstructError(f"a link leads from {path.parent} to another folder now")
    # Some names are so long that a hidden name made of them would be too long.
    staged = staged_name(path.with_name("file"), token)
    with refusing(path, "put back", ReconstructError):
        make_folder(path.parent)
        # Not a link: a program that writes to the file must not change the kept one.
        copy_file(aside, staged, mode=entry.mode & 0o777, mtime_ns=entry.mtime_ns)
        take(staged, path, None)
