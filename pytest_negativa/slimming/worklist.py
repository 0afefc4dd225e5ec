"""Rules for each library of a folder: by a lock, not in it, never loaded, kept, ours, undone.

A library of a lock goes to that lock's recipe, by its digest. For each other one an ordered list of
rules is asked, and the first answer counts. ``classify`` tells what a recipe makes of a library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec import structs

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary
from pytest_negativa.models.settings import Libraries
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.rewriting.compact.records import MIN_GAIN
from pytest_negativa.settings.globs import (
    LibraryNames,
    first_glob,
    is_selected,
    matches_library,
    normalized,
)
from pytest_negativa.slimming.code_files import (
    Package,
    packages_by_archs,
    packages_by_lock,
    removed_packages,
)
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.manifest import is_reinstalled, may_be_kept
from pytest_negativa.slimming.recipes import (
    FOR_NEVER_LOADED,
    Kind,
    Recipe,
    by_digest,
    for_others,
    keep_whole,
    lock_in_words,
    never_loaded,
)
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slimmed import (
    UNREADABLE,
    Slimmed,
    find_slimmed,
    find_unlisted,
    kept_original,
)
from pytest_negativa.slimming.spares import find_spare, is_moved, problem_of
from pytest_negativa.slimming.tree import FileGroup, Tree
from pytest_negativa.tracing.mappings import parse_maps

_OWN_DISTRIBUTION = "pytest_negativa"
# With what they require: CUPTI is loaded where programs are traced.
_OWN_DISTRIBUTIONS = (
    "pytest-negativa",
    "cupti-python",
    "nvidia-cuda-cupti",
    "nvidia-cuda-cupti-cu12",
)
_OWN = "negativa runs in this environment, and needs it itself"
_INTERPRETER = "libpython"
# Of glibc, musl and their loaders.
_LIBC = ("ld-linux", "ld-musl", "ld-2.", "libc.so", "libc-2.", "libc.musl")


def runs_below(path: Path, names: Iterable[str]) -> str | None:
    """The reason to keep a library whole that no test loaded; None if it may lose code.

    Args:
        path: of the library.
        names: all its names, below some folder, and its soname.
    """
    if _OWN_DISTRIBUTION in path.parts:
        return "it is a part of pytest-negativa"
    for name in (name.rpartition("/")[2] for name in names):
        if name.startswith(_LIBC):
            return "it is a part of the C library"
        if name.startswith(_INTERPRETER):
            return "it is an interpreter of Python"
    return None


_KEPT = (
    "libraries.include, libraries.exclude or keep.libraries of the project keeps it, so it stays "
    "whole although no test loaded it"
)
_NOT_MOVED = (
    "it was moved whole, and now a run opened it, or remove in negativa.yaml does not name it"
)
_LEFT_OUT = "the lock leaves it out, so all of it is needed"
_HAS_SPARE = (
    "was slimmed with a spare, which would go with its original: pass --spare DIR to have one "
    "again, or --keep-originals DIR"
)
_NOT_KEPT = (
    "no original is kept, because it was slimmed without --keep-originals before; to have one, "
    "install it again, then slim"
)


@dataclass(frozen=True, slots=True)
class Task:
    """A library to slim.

    Attributes:
        recipe: what to do.
        source: the original; with ``spare``, the library that was made of it.
        names: the names that will lead to the result, below the folder.
        size: bytes of the original.
        slimmed: the file that is there, if it was slimmed before.
        outside: how many names of the file lie outside of the folder.
        spare: the original is made again from ``source`` and this file.
    """

    recipe: Recipe
    source: Path
    names: tuple[str, ...]
    size: int
    slimmed: Slimmed | None = None
    outside: int = 0
    spare: Path | None = None

    @property
    def name(self) -> str:
        return self.names[0]


Library: TypeAlias = Slimmed | FileGroup


def classify(
    tree: Tree, library: Library, recipe: Recipe, *, keeps_original: bool = False
) -> Task | SlimRow | None:
    """The task that a recipe makes of a library, as if it had never been slimmed.

    Args:
        tree: where it lies.
        library: the file, or the slimmed library that it belongs to.
        recipe: what is wanted.
        keeps_original: whether the original will be kept.

    Returns:
        A task; a row that tells why there is none; None if there is nothing to do or to tell.
    """
    if isinstance(library, Slimmed):
        return _classify_slimmed(tree, library, recipe, keeps_original=keeps_original)
    # A digest of the lock says enough.
    if recipe.kind is not Kind.LOCK and not tree.is_library(library):
        return None
    if not recipe.takes_others and tree.has_gpu_code(library) is False:
        return None
    # A bind mount shows one name in two folders.
    outside = max(0, library.links - len(library.names))
    return Task(recipe, tree.root / library.name, library.names, library.size, outside=outside)


def _classify_slimmed(
    tree: Tree, library: Slimmed, recipe: Recipe, *, keeps_original: bool
) -> Task | SlimRow:
    entry = library.entry
    if library.is_whole and entry.recipe == recipe.digest:
        lacks = keeps_original and entry.spare is None and not may_be_kept(entry)
        row = _already(tree, library, recipe)
        return structs.replace(row, notes=(_NOT_KEPT,)) if lacks else row
    loses_spare = entry.spare is not None and recipe.spare is None and not keeps_original
    try:
        if loses_spare and recipe.kind is not Kind.WHOLE:
            raise ReconstructError(_HAS_SPARE)
        return task_of(tree, library, recipe)
    except NegativaError as e:
        # If GPU code is gone, some of it may be what the recipe keeps.
        keeps_none = recipe.kind in {Kind.STRIP, *FOR_NEVER_LOADED}
        is_fine = library.is_whole and (keeps_none or not entry.gpu_code_removed)
        status = SlimStatus.LEFT if is_fine else SlimStatus.FAILED
        return SlimRow.unchanged(library.key, status, entry.size, str(e))


def task_of(tree: Tree, library: Slimmed, recipe: Recipe) -> Task:
    """The task for a slimmed library, which begins with its original.

    Raises:
        ReconstructError: the original is lost, or what is there can't be read.
    """
    entry, names = library.entry, library.names or library.entry.names
    if library.results and library.sha256 is None:
        raise ReconstructError(UNREADABLE)
    found = [tree.root / name for name in library.originals[:1]]
    source = found[0] if found else kept_original(tree, entry)
    here = tree.root / names[0]
    spare = find_spare(here, tree.note(names[0])) if source is None else None
    return Task(recipe, source or here, names, entry.original_size, library, spare=spare)


def _already(tree: Tree, library: Slimmed, recipe: Recipe) -> SlimRow:
    entry, why = library.entry, recipe.why(has_gpu_code=library.entry.gpu_code_removed > 0)
    name, problem = library.results[0], None
    if entry.spare is not None:
        problem = problem_of(tree.root / name, tree.note(name), thorough=False)
    status, detail = problem or (SlimStatus.ALREADY, why)
    return SlimRow(
        path=library.key,
        status=status,
        before=entry.original_size,
        after=entry.size,
        detail=detail,
        others=len(entry.names) - 1,
        moved=recipe.kind is Kind.MOVED,
    )


class WorkList:
    """The work in a folder, whose files are given to the recipes.

    Args:
        journal: of the folder.
        options: how to do it.
        by_digest: see ``find_slimmed``.

    Attributes:
        tasks: libraries to slim, or to make whole.
        rows: what is known beforehand.
        past: entries of the manifest that are of no use any more.
        packages: the files that are GPU code themselves.
        listed: the globs of ``SpareTarget.remove`` that match a library of any use.
        opened: names of libraries that could go whole if no run had opened them.
        slimmed: the slimmed libraries that are there.
        away: those of the manifest that are not there.
        slimmed_by_name: the same, by each of their names.
        lost: why the original of any other slimmed library is lost.
        unread: sizes in bytes of files that can't be read.
    """

    def __init__(self, journal: Journal, options: SlimOptions, *, by_digest: bool = False) -> None:
        self.journal = journal
        self.tree = tree = journal.tree
        self.manifest = manifest = journal.manifest
        self.options = options
        self.tasks: list[Task] = []
        self.rows: list[SlimRow] = []
        self.packages: list[Package] = []
        self.listed: set[str] = set()
        self.opened: list[str] = []
        unlisted, self.lost = find_unlisted(tree, manifest)
        known = list(find_slimmed(tree, manifest, by_digest=by_digest))
        self.slimmed = [*(one for one in known if one.results), *unlisted]
        self.away = [one for one in known if not one.results]
        self.past = [one for one in known if one.is_past]
        self._taken: set[str] = set()
        self.unread: set[int] = set()
        self.slimmed_by_name = {name: one for one in reversed(self.slimmed) for name in one.names}

    @functools.cached_property
    def _own(self) -> frozenset[str]:
        return _libraries_of_negativa(self.tree)

    @property
    def size(self) -> int:
        """Bytes of all work."""
        tasks, packages = self.tasks, self.packages
        return sum(task.size for task in tasks) + sum(package.size for package in packages)

    def add_unchanged(self, name: str, status: SlimStatus, size: int, detail: str) -> None:
        """Add a row for a file that stays as it is; ``size`` in bytes."""
        self.rows.append(SlimRow.unchanged(name, status, size, detail))

    def add_packages(self, packages: Iterable[Package]) -> None:
        """Add packages, with the rows that are known of them; a spare takes no files."""
        for package in packages:
            if (row := package.row_before(spare=self.options.spare is not None)) is not None:
                self.rows.append(row)
            elif package.unused:
                self.packages.append(package)

    def is_free(self, names: Iterable[str]) -> bool:
        """Whether no recipe has one of these names yet."""
        return self._taken.isdisjoint(names)

    def take(self, library: Library) -> None:
        """Keep a library from all recipes that follow."""
        self._taken.update(library.names)

    def add(self, library: Library, recipe: Recipe | SlimRow) -> None:
        """Give a library to a recipe, or to a row that tells why not, unless one has it."""
        if not self.is_free(library.names):
            return
        self.take(library)
        is_own = any(str(self.tree.root / name) in self._own for name in library.names)
        if is_own and isinstance(library, FileGroup):
            if self.tree.has_gpu_code(library):
                self.add_unchanged(library.name, SlimStatus.LEFT, library.size, _OWN)
            return
        outcome = (
            recipe
            if isinstance(recipe, SlimRow)
            else classify(
                self.tree,
                library,
                recipe,
                keeps_original=self.options.keep_originals is not None,
            )
        )
        if isinstance(outcome, Task):
            self.tasks.append(outcome)
        elif outcome is not None:
            self.rows.append(outcome)

    def libraries(self) -> Iterator[tuple[FileGroup, Library]]:
        """The files that no recipe has yet, and the libraries that each belongs to."""
        for group in self.tree.groups:
            slimmed = map(self.slimmed_by_name.get, group.names)
            library: Library = next(filter(None, slimmed), None) or group
            is_named = isinstance(library, Slimmed) or ".so" in group.name.rpartition("/")[2]
            if is_named and self.is_free(library.names):
                yield group, library

    def digests(self, sizes: Set[int]) -> dict[FileGroup, str | None]:
        """Digests of the files that have one of these sizes in bytes, and no recipe yet."""
        candidates = (g for g in self.tree.groups if g.size in sizes and self.is_free(g.names))
        found = {group: self.tree.digest(group) for group in candidates}
        for group in [group for group, digest in found.items() if digest is None]:
            self.unread.add(group.size)
            self.take(group)
            self.add_unchanged(group.name, SlimStatus.FAILED, group.size, UNREADABLE)
        return found


def find_work(
    journals: Sequence[Journal], request: SlimRequest
) -> tuple[list[WorkList], list[SlimRow]]:
    """Give the files of folders to recipes.

    Args:
        journals: of the folders.
        request: what stays.

    Returns:
        The work in each folder, and rows for libraries of a lock that are in none.
    """
    lock, spare = request.lock, request.options.spare
    rows = () if lock is None else lock.gpu_libraries if spare is None else lock.libraries
    sizes = {row.size for row in rows}
    searched = lock is None or bool(request.devices) or request.drop_never_loaded
    for tree in (journal.tree for journal in journals):
        tree.searched, tree.hashed = searched, sizes
        tree.digests((g for g in tree.groups if g.size in sizes), request.options.jobs)
    folders = [WorkList(journal, request.options) for journal in journals]
    if lock is None:
        others = for_others(request)
        assert others is not None
        for folder in folders:
            for _, library in folder.libraries():
                folder.add(library, others)
            folder.add_packages(packages_by_archs(folder.tree, folder.manifest, others))
        return folders, []
    unmet = _match_lock(folders, rows, sizes, by_digest(request, lock))
    for folder in folders:
        _Others(folder, request, lock).apply()
    return folders, [*unmet, *_add_packages(folders, lock, request.options)]


def _match_lock(
    folders: Sequence[WorkList],
    rows: Sequence[LockedLibrary],
    sizes: Set[int],
    recipes: Mapping[str, Recipe],
) -> list[SlimRow]:
    """Give the files of folders to the libraries of a lock.

    Returns:
        A row for each library that is another file, and each with GPU code that is in no folder. Of
        the others, some belong to the tests, or to the system.
    """
    found = set()
    for folder in folders:
        originals: list[tuple[Library, str | None]] = [
            *((one, one.entry.original_sha256) for one in folder.slimmed),
            *folder.digests(sizes).items(),
        ]
        for library, sha256 in originals:
            if sha256 is not None and sha256 in recipes:
                found.add(sha256)
                folder.add(library, recipes[sha256])
    unread = {size for folder in folders for size in folder.unread}
    missing = (one for one in rows if one.sha256 not in found and one.size not in unread)
    return [
        row
        for library in missing
        for row in (_unmet(library, folders),)
        if library.code_sha256 is not None or row.status is not SlimStatus.MISSING
    ]


class _Others:
    """The rules for libraries of a folder that a lock does not know by content.

    Args:
        folder: whose libraries.
        request: what stays.
        lock: that of the request.
    """

    def __init__(self, folder: WorkList, request: SlimRequest, lock: Lock) -> None:
        self._folder, self._tree, self._lock = folder, folder.tree, lock
        self._others, spare = for_others(request), request.options.spare
        rows: tuple[LockedLibrary | LeftOut, ...] = (*lock.libraries, *lock.left_out)
        paths = {row.path for row in rows}.union(*(row.others for row in lock.libraries))
        self._loaded = {path.rpartition("/")[2] for path in paths}
        is_here = any(
            not folder.is_free(group.names) or not self._loaded.isdisjoint(group.base_names)
            for group in folder.tree.groups
        )
        self._loaded.update(row.soname for row in rows if row.soname is not None)
        self._left_out = tuple(f"/{row.path}" for row in lock.left_out)
        # What the project lets lose its code.
        self._selected = Libraries(include=lock.include, exclude=lock.exclude)
        wanted = {
            Kind.NEVER_LOADED: request.drop_never_loaded,
            Kind.SPARED: spare is not None and request.spare_never_loaded,
            # Else the lock is that of another environment.
            Kind.MOVED: spare is not None and lock.has_pages and is_here,
        }
        recipes = {kind: never_loaded(kind, request, lock) for kind in wanted if wanted[kind]}
        never, self._spared, self._moves = map(recipes.get, wanted)
        self._remove = () if spare is None or self._moves is None else spare.remove
        self._keep = () if spare is None else spare.keep
        versions = {
            (normalized(row.distribution or ""), row.version)
            for row in (*lock.gpu_libraries, *lock.left_out) or rows
        }
        locked = {name for name, _ in versions if name}
        # Of the lock's distributions and of what they require, by path: what becomes of libraries
        # that were never loaded. In another version, more libraries may be loaded.
        self._never: dict[str, Recipe | None] = {}
        for site in folder.tree.sites:
            found = tuple(site.with_requirements(locked)) if self._others or never else ()
            here = {(normalized(one.name), one.version) for one in found}
            are_same = all(one in versions or one[0] not in locked for one in here)
            owned = (path for one in found for path in one.libraries)
            self._never |= dict.fromkeys(owned, never if are_same else None)

    def apply(self) -> None:
        """Give the libraries to recipes, or to rows that tell why they stay."""
        for group, library in self._folder.libraries():
            if (answer := self._answer(group, library)) is not None:
                self._folder.add(library, answer)
        if self._remove:
            self._note_listed()

    def _answer(self, group: FileGroup, library: Library) -> Recipe | SlimRow | None:
        """The first rule that applies counts; None: the library is no concern."""
        is_slimmed = isinstance(library, Slimmed)
        if isinstance(library, Slimmed) and self._is_left_out(library):
            return keep_whole(_LEFT_OUT)
        names = self._names_of(group)
        # A library in any folder may be loaded in place of one that a run loaded, if they share the
        # base name or the soname.
        is_known = not self._loaded.isdisjoint({names.soname, *group.base_names})
        # All code may go of a library that is no small one.
        may_go = (
            (is_slimmed or group.size >= MIN_GAIN) and not is_known and self._tree.is_library(group)
        )
        if may_go and first_glob(self._remove, names) and first_glob(self._keep, names) is None:
            return self._unless_it_runs(self._moves, group, library)
        may_be_spared = may_go and self._spared is not None
        paths = [str(self._tree.root / name) for name in group.names]
        owned = [self._never[path] for path in paths if path in self._never]
        is_never = may_be_spared or (any(owned) and not is_known)
        is_kept = is_never and not is_selected(self._selected, names)
        if may_be_spared and not is_kept:
            return self._unless_it_runs(self._spared, group, library)
        recipe = (owned[0] if owned and is_never and not is_kept else None) or self._others
        if owned and recipe is not None:
            return recipe
        if is_slimmed and self._moves is not None and is_moved(self._tree.note(library.names[0])):
            return keep_whole(_NOT_MOVED)
        if is_kept and ((may_be_spared and self._lock.has_pages) or self._tree.has_gpu_code(group)):
            return _stays(group, library, _KEPT)
        return None

    def _names_of(self, group: FileGroup) -> LibraryNames:
        owners = (one.name for name in group.names for one in self._tree.installers(name)[-1:])
        return LibraryNames(
            str(self._tree.root / group.name), self._tree.facts(group).soname, next(owners, None)
        )

    def _note_listed(self) -> None:
        """Note which globs match libraries of any use, and which of these don't go whole."""
        folder = self._folder
        told = {
            *(task.name for task in folder.tasks if task.recipe.kind is Kind.MOVED),
            *(row.path for row in folder.rows if row.moved or row.status is SlimStatus.LEFT),
        }
        for group in self._tree.groups:
            is_large = group.size >= MIN_GAIN or group.name in folder.slimmed_by_name
            if is_large and self._tree.is_library(group):
                names = self._names_of(group)
                listed = {glob for glob in self._remove if matches_library(glob, names)}
                folder.listed |= listed
                if listed and told.isdisjoint(group.names):
                    folder.opened.append(group.name)

    def _unless_it_runs(
        self, recipe: Recipe | None, group: FileGroup, library: Library
    ) -> Recipe | SlimRow | None:
        """A recipe for a library that no test loaded, unless processes run by it."""
        names = (*group.names, self._tree.facts(group).soname or "")
        reason = runs_below(self._tree.root / group.name, names)
        return recipe if reason is None else _stays(group, library, reason)

    def _is_left_out(self, library: Slimmed) -> bool:
        """Whether the lock needs it whole, and the result that is here lacks code."""
        if self._others is not None and self._others.kind is Kind.ARCHS:
            return False
        here = (f"/{(self._tree.root / name).as_posix()}" for name in library.names)
        return library.entry.gpu_code_removed > 0 and any(p.endswith(self._left_out) for p in here)


def _stays(group: FileGroup, library: Library, reason: str) -> Recipe | SlimRow:
    """A row for a library that stays as it is; the original of a slimmed one comes back."""
    if isinstance(library, Slimmed):
        return keep_whole(reason)
    return SlimRow.unchanged(group.name, SlimStatus.LEFT, group.size, reason)


def _add_packages(
    folders: Sequence[WorkList], lock: Lock, options: SlimOptions
) -> Iterator[SlimRow]:
    """Add the files of a lock; yield a row for each distribution that is in no folder."""
    is_spared, source = options.spare is not None, lock_in_words(lock)
    for files in lock.files:
        packages = [
            list(packages_by_lock(folder.tree, folder.manifest, files, source, options))
            for folder in folders
        ]
        for folder, found in zip(folders, packages, strict=True):
            folder.add_packages(found)
        if not any(packages) and not is_spared:
            name = f"{files.distribution} {files.version}"
            detail = "it is not here; install it, or lock a run without it"
            yield SlimRow.unchanged(name, SlimStatus.MISSING, files.size, detail)


def _libraries_of_negativa(tree: Tree) -> frozenset[str]:
    """The libraries by which negativa works, and its Python, by real path."""
    here = set(map(os.path.realpath, sys.path))
    own = {
        path
        for site in tree.sites
        if str(site.folder) in here
        for one in site.with_requirements(_OWN_DISTRIBUTIONS)
        for path in one.libraries
    }
    # What this process may not read, it can't slim either.
    with contextlib.suppress(OSError):
        mapped = parse_maps(Path("/proc/self/maps").read_bytes())
        own |= {os.fsdecode(one.file.path) for one in mapped if one.file is not None}
        modules = Path(os.path.realpath(sysconfig.get_config_var("DESTSHARED") or "/dev/null"))
        own.update(map(str, modules.glob("*.so")))
    return frozenset(own)


def _unmet(library: LockedLibrary, folders: Sequence[WorkList]) -> SlimRow:
    wanted = f" (of {library.distribution} {library.version})" if library.distribution else ""
    for folder in folders:
        named = [
            (name, group)
            for group in folder.tree.groups
            for name in group.names
            if name.rpartition("/")[2] == library.name
            # Extension modules of many packages have one file name.
            and (library.code_sha256 is not None or f"/{name}".endswith(f"/{library.path}"))
            and folder.is_free(group.names)
        ]
        # The file that lies where the lock's does, rather than one of the same name elsewhere.
        for name, group in sorted(named, key=lambda found: not library.path.endswith(found[0])):
            folder.take(group)
            # What the lock needs of it may be gone. Other originals are known to be other files.
            if group in folder.lost:
                return SlimRow.unchanged(name, SlimStatus.FAILED, group.size, folder.lost[group])
            detail = (
                f"not the file that was proved{wanted}; left as it is: install that file, or prove "
                "and lock this one"
            )
            return SlimRow.unchanged(name, SlimStatus.DIFFERENT, group.size, detail)
    detail = f"it is not here{wanted}; install it, or lock a run that doesn't load it"
    return SlimRow.unchanged(library.path, SlimStatus.MISSING, library.size, detail)


# ---- Undo ----


def find_originals(journal: Journal, options: SlimOptions) -> WorkList:
    """The work in a folder to put its originals back."""
    tree = journal.tree
    tree.hashed = {entry.size for entry in journal.manifest.slimmed.values()}
    tree.digests((group for group in tree.groups if group.size in tree.hashed), options.jobs)
    work = WorkList(journal, options, by_digest=True)
    for slimmed in (*work.slimmed, *work.away):
        row = None if slimmed.results else _row_away(tree, slimmed, options)
        if row is not None:
            work.rows.append(row)
            continue
        try:
            work.tasks.append(task_of(tree, slimmed, keep_whole()))
        except NegativaError as e:
            work.add_unchanged(slimmed.key, SlimStatus.FAILED, slimmed.entry.size, str(e))
    for group, problem in work.lost.items():
        work.add_unchanged(group.name, SlimStatus.FAILED, group.size, problem)
    work.packages += removed_packages(tree, journal.manifest).values()
    return work


def _row_away(tree: Tree, slimmed: Slimmed, options: SlimOptions) -> SlimRow | None:
    """The row of a library that is away; None: its original comes back."""
    entry = slimmed.entry
    if slimmed.originals:
        return SlimRow(
            path=slimmed.key,
            status=SlimStatus.WOULD_UNDO if options.dry_run else SlimStatus.UNDONE,
            before=entry.size,
            after=entry.original_size,
            detail="it was back already",
        )
    places = [tree.root / name for name in entry.names]
    ours = all(one.parent.is_dir() and one.parent.resolve() == one.parent for one in places)
    if slimmed.another is not None:
        detail = slimmed.another
    elif any(is_reinstalled(entry, tree.records(name)) for name in entry.names):
        detail = "it is no longer there, and RECORD has the digest of another file"
    elif not ours or any(map(os.path.lexists, places)) or entry.original is None:
        detail = "it is no longer there"
    else:
        return None
    return SlimRow.unchanged(slimmed.key, SlimStatus.LEFT, entry.size, detail)
