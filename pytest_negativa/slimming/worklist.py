"""Which library of a folder gets which recipe. Reads files, and writes nothing.

A library of a lock goes to that lock's recipe, by its digest. For each other one an ordered list of
rules is asked, and the first answer counts. ``classify`` tells what a recipe makes of a library.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from pytest_negativa.arch import OLDEST_DEVICES, ComputeCapability
from pytest_negativa.errors import FormatError, NegativaError, OptionError
from pytest_negativa.gpucode.library import has_gpu_code, read_library
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.toolkit import cuda_major
from pytest_negativa.installed.distributions import normalized
from pytest_negativa.models.library import Scope
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary
from pytest_negativa.models.settings import Libraries
from pytest_negativa.models.slimming import LeftFile, SlimManifest, SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import LibraryNames, is_selected
from pytest_negativa.slimming.code_files import (
    Package,
    packages_by_lock,
)
from pytest_negativa.slimming.code_files import find_by_archs as packages_by_archs
from pytest_negativa.slimming.manifest import (
    UNREADABLE,
    Fate,
    is_original,
    is_result,
    judge,
    may_be_kept,
    other_manifest,
)
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    Kind,
    Recipe,
    by_lock,
    by_pages,
    names_of,
    never_loaded,
)
from pytest_negativa.slimming.spares import (
    MIN_GAIN,
    SpareAwayError,
    SparePolicy,
    find_spare,
    note_of,
)
from pytest_negativa.slimming.tree import FileGroup, Tree, digest_of, read_fact, soname_of
from pytest_negativa.storage.records import utf8

_OWN_DISTRIBUTION = "pytest_negativa"
_INTERPRETER = "libpython"
# Of glibc, musl and their loaders.
_LIBC = ("ld-linux", "ld-musl", "ld-2.", "libc.so", "libc-2.", "libc.musl")


class Role(enum.Enum):
    """What the run of a lock had to do with a library."""

    LOADED = "loaded, or may stand for one that was"
    NEVER = "never loaded"
    KEPT = "never loaded, and the project keeps it"


def runs_below(path: Path, names: Iterable[str]) -> str | None:
    """Why a library must stay whole even if no test loaded it; None if it may lose code.

    Args:
        path: of the library.
        names: all its names, below some folder.
    """
    if _OWN_DISTRIBUTION in path.parts:
        return "it is a part of pytest-negativa"
    for name in (*(name.rpartition("/")[2] for name in names), soname_of(path) or ""):
        if name.startswith(_LIBC):
            return "it is a part of the C library"
        if name.startswith(_INTERPRETER):
            return "it is an interpreter of Python"
    return None


def require_known(lock: Lock) -> None:
    """Refuse a lock that doesn't prove what was loaded.

    Raises:
        OptionError: the lock is not proved, has no libraries, or its run may have loaded more.
    """
    proof = lock.proof
    if not proof.proved:
        raise OptionError("--drop-never-loaded goes with a proved lock; this one is not proved")
    if proof.incomplete:
        raise OptionError(
            "--drop-never-loaded: the run of the lock may have loaded more libraries: "
            f"{'; '.join(proof.incomplete)}"
        )
    if not lock.libraries:
        raise OptionError("--drop-never-loaded: the lock has no libraries, so it proves nothing")


_IN_ANOTHER_WAY = "was slimmed before in another way, and its original was not kept"
_DAMAGED = "was slimmed, and differs from what was written; install it again, then slim"
_DAMAGED_UNDO = (
    "was slimmed, and differs from what was written; negativa slim undo, or install it again, "
    "then slim"
)
_NOT_AGAIN = (
    "was slimmed before, by another lock or with other options, and its original was not kept; "
    "install it again, then slim"
)

_LEFT_OUT = (
    "was slimmed before, by another lock or with other options; this lock leaves it out, so all of "
    "it is needed: install it again"
)
_HAS_SPARE = "was slimmed before, and its spare has its symbol tables, too"
ANOTHER_PLACE = (
    "pass --spare DIR to put its next spare elsewhere, or --keep-originals DIR to have none"
)
"""What to do if a spare can't lie where the one before does."""

_SPARE_NEAR = (
    "its spare lies in the folder to slim, in one around it, or in one whose path is not UTF-8; "
    f"{ANOTHER_PLACE}"
)
_KEPT = (
    "libraries.include, libraries.exclude or keep.libraries of the project keeps it, so it stays "
    "whole although no test loaded it"
)
_IS_THERE = {SlimStatus.ALREADY, SlimStatus.SPARE_AWAY}
_LEFT_OUT_UNDO = f"{_LEFT_OUT}, or negativa slim undo"


@dataclass(frozen=True, slots=True)
class Task:
    """A library to slim.

    Attributes:
        recipe: what to do.
        source: the original; with ``is_cut``, the library with a spare that was made of it.
        names: the names that will lead to the result, below the folder.
        size: bytes of the original.
        before: the manifest's entry, if the file that is there was slimmed before.
        outside: how many names of the file lie outside of the folder.
        is_cut: the original is made again from ``source`` and its spare.
    """

    recipe: Recipe
    source: Path
    names: tuple[str, ...]
    size: int
    before: SlimmedFile | None = None
    outside: int = 0
    is_cut: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class WorkList:
    """What is to be done in a folder.

    Attributes:
        tasks: libraries to slim.
        links: names that will lead to a result that exists: name to name of the result.
        rows: what is known beforehand.
        current: names whose file is a result.
        stale: entries of the manifest whose file is gone or another one.
        packages: the files that are GPU code themselves.
    """

    tasks: list[Task] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    rows: list[SlimRow] = field(default_factory=list)
    current: set[str] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)
    packages: list[Package] = field(default_factory=list)

    def add_packages(self, packages: Iterable[Package], *, spare: bool) -> None:
        """Add packages, with the rows that are known of them; a spare takes no files."""
        for package in packages:
            if spare:
                self.rows += [package.left_by_spare()] if package.unused else []
            elif (row := package.row_before()) is not None:
                self.rows.append(row)
            elif package.unused:
                self.packages.append(package)


@dataclass(frozen=True, slots=True)
class KnownResult:
    """A library of the manifest whose result is there.

    Attributes:
        key: of its entry.
        entry: what the manifest says.
        results: those of its names that lead to the result.
        originals: those that still lead to the original, because a run was killed between the
            names of one file.
    """

    key: str
    entry: SlimmedFile
    results: tuple[str, ...]
    originals: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.entry.names

    def unchanged(self, status: SlimStatus, detail: str) -> SlimRow:
        """A row for a library that stays as it is."""
        return SlimRow.unchanged(self.key, status, self.entry.size, detail)


Library: TypeAlias = KnownResult | FileGroup


def classify(
    tree: Tree, library: Library, left: LeftFile | None, recipe: Recipe
) -> Task | SlimRow | None:
    """What a recipe makes of a library: a task, or a row that tells why there is none.

    Args:
        tree: where it lies.
        library: the file, or the entry of the manifest that it belongs to.
        left: what the manifest says of a file that an earlier run left as it is.
        recipe: what is wanted.

    Returns:
        None if there is nothing to do and nothing to tell.
    """
    if isinstance(library, KnownResult):
        return _classify_slimmed(tree, library, recipe)
    if left is not None and _is_left(library, left, recipe):
        if left.reason == NO_GPU_CODE:
            return None
        return SlimRow.unchanged(library.name, SlimStatus.LEFT, library.size, left.reason)
    # A digest of the lock says enough.
    if recipe.kind is not Kind.LOCK and not tree.is_library(library):
        return None
    # A bind mount shows one name in two folders.
    outside = max(0, library.links - len(library.names))
    source = tree.root / library.name
    return Task(recipe, source, library.names, library.size, outside=outside)


def _classify_slimmed(tree: Tree, library: KnownResult, recipe: Recipe) -> Task | SlimRow:
    entry, path = library.entry, tree.root / library.results[0]
    if entry.recipe == recipe.digest:
        status, detail = SlimStatus.ALREADY, recipe.why(has_gpu_code=entry.gpu_code_removed > 0)
        try:
            if entry.spare is not None:
                find_spare(path)
        except NegativaError as e:
            is_away = isinstance(e, SpareAwayError)
            status = SlimStatus.SPARE_AWAY if is_away else SlimStatus.FAILED
            detail = str(e).removeprefix(f"{path}: ")
        return SlimRow(
            path=library.key,
            status=status,
            before=entry.original_size,
            after=entry.size,
            detail=detail,
            others=len(entry.names) - 1,
        )
    kept = None if entry.original is None else Path(entry.original)
    if kept is not None and digest_of(kept) == entry.original_sha256:
        return Task(recipe, kept, library.results, entry.original_size, before=entry)
    if entry.spare is not None:
        return Task(recipe, path, library.results, entry.original_size, before=entry, is_cut=True)
    # If GPU code is gone, some of it may be what the recipe keeps.
    if entry.gpu_code_removed and recipe.kind not in (Kind.STRIP, Kind.NEVER_LOADED):
        return library.unchanged(SlimStatus.FAILED, _NOT_AGAIN)
    return library.unchanged(SlimStatus.LEFT, _IN_ANOTHER_WAY)


def _keep_spare(tree: Tree, library: KnownResult, recipe: Recipe) -> Recipe | SlimRow:
    """The recipe with the spare of a library, without which its original would be lost.

    Returns:
        A row if the library stays as it is.
    """
    entry = library.entry
    if recipe.kind is Kind.STRIP:
        return library.unchanged(SlimStatus.LEFT, _HAS_SPARE)
    if recipe.spare is not None or entry.spare is None:
        return recipe
    path = tree.root / library.results[0]
    try:
        spare = SparePolicy(Path(entry.spare).parent, by_arch=recipe.kind is Kind.ARCHS)
        if (same := replace(recipe, spare=spare)).digest == entry.recipe:
            return same
        folder = find_spare(path).parent
    except NegativaError as e:
        return library.unchanged(SlimStatus.FAILED, str(e).removeprefix(f"{path}: "))
    real = folder.resolve()
    # As for --spare: no scan enters a folder of spares.
    is_near = tree.root == real or tree.root in real.parents or real in tree.root.parents
    if is_near or utf8(str(folder)) != str(folder):
        return library.unchanged(SlimStatus.FAILED, _SPARE_NEAR)
    return replace(recipe, spare=replace(spare, folder=folder))


def _is_left(group: FileGroup, left: LeftFile, recipe: Recipe) -> bool:
    """Whether an earlier run with this recipe left this very file as it is."""
    known = (left.size, left.mtime_ns, left.recipe) == (group.size, group.mtime_ns, recipe.digest)
    return known and not (recipe.strips_others and left.reason == NO_GPU_CODE)


class _Folder:
    """A tree with its manifest, whose files are given to the recipes.

    Args:
        keeps_spares: a library with a spare is cut anew, also by a recipe without spares.
        jobs: files to read at a time.

    Attributes:
        work: what is to be done there.
        slimmed: the libraries whose results are there.
    """

    def __init__(
        self, tree: Tree, manifest: SlimManifest, *, keeps_spares: bool, jobs: int
    ) -> None:
        self.tree = tree
        self.manifest = manifest
        self._keeps_spares = keeps_spares
        self._jobs = jobs
        self.work = WorkList(rows=[*tree.unlisted_rows(), *tree.unnamed_rows()])
        self.slimmed: list[KnownResult] = []
        self._taken: set[str] = set()
        # Digests of originals, and sizes of files, that may be here: damaged, or unreadable.
        self._damaged: set[str] = set()
        self._unread: set[int] = set()
        for key, entry in manifest.slimmed.items():
            self._add_entry(key, entry)
        self._slimmed_by_name = {name: one for one in reversed(self.slimmed) for name in one.names}

    def _add_entry(self, key: str, entry: SlimmedFile) -> None:
        tree = self.tree
        results = tuple(name for name in entry.names if is_result(tree, name, entry))
        if results:
            rest = (name for name in entry.names if name not in results)
            originals = tuple(name for name in rest if is_original(tree, name, entry))
            self.slimmed.append(KnownResult(key, entry, results, originals))
            self.work.current.update(results)
            return
        found = judge(tree, entry)
        fates = {one.fate for one in found.values()} & {Fate.RESULT, Fate.UNREADABLE}
        if not fates:
            # The library may be away for a while, and the entry is the way to the original.
            is_away = tree.is_hidden(entry.names) or may_be_kept(entry)
            self.work.stale += [key] if not is_away and tree.covers(entry.names) else []
            return
        self._damaged.add(entry.original_sha256)
        status, detail = SlimStatus.FAILED, UNREADABLE
        if Fate.RESULT in fates:
            # None is whole, so this one was damaged.
            status = SlimStatus.CHANGED
            detail = _DAMAGED_UNDO if may_be_kept(entry) else _DAMAGED
            fates = {Fate.RESULT}
        for name, one in found.items():
            group = tree.group_of(name)
            if group is not None and one.fate in fates and self.is_free(group.names):
                self.settle(group, SlimRow.unchanged(name, status, group.size, detail))

    def is_free(self, names: Iterable[str]) -> bool:
        """Whether no recipe has one of these names yet."""
        return self._taken.isdisjoint(names)

    def take(self, library: Library) -> None:
        """Keep a library from all recipes that follow."""
        self._taken.update(library.names)

    def settle(self, library: Library, row: SlimRow) -> None:
        """Keep a library from all recipes; the row tells why."""
        self.take(library)
        self.work.rows.append(row)

    def add(self, library: Library, recipe: Recipe) -> None:
        """Give a library to a recipe, unless another one has it."""
        if not self.is_free(library.names):
            return
        wanted: Recipe | SlimRow = recipe
        if isinstance(library, KnownResult) and library.entry.spare and self._keeps_spares:
            wanted = _keep_spare(self.tree, library, recipe)
        if isinstance(wanted, SlimRow):
            self.settle(library, wanted)
            return
        self.take(library)
        outcome = classify(self.tree, library, self.manifest.left.get(library.names[0]), wanted)
        if isinstance(outcome, Task):
            self.work.tasks.append(outcome)
        elif outcome is not None:
            self.work.rows.append(outcome)
            if isinstance(library, KnownResult) and outcome.status in _IS_THERE:
                self.work.links |= dict.fromkeys(library.originals, library.results[0])

    def libraries(self) -> Iterator[tuple[FileGroup, Library]]:
        """The files that no recipe has yet, and the libraries that each belongs to."""
        for group in self.tree.groups:
            slimmed = map(self._slimmed_by_name.get, group.names)
            library: Library = next(filter(None, slimmed), None) or group
            is_named = isinstance(library, KnownResult) or ".so" in group.name.rpartition("/")[2]
            if is_named and self.is_free(library.names):
                yield group, library

    def add_left(self, recipes: Sequence[Recipe]) -> Iterator[str]:
        """Digests of the recipes by which an earlier run left a file that is still there."""
        by_digest = {recipe.digest: recipe for recipe in recipes}
        for name, left in self.manifest.left.items():
            group, recipe = self.tree.group_of(name), by_digest.get(left.recipe)
            if group is not None and recipe is not None and _is_left(group, left, recipe):
                self.add(group, recipe)
                yield recipe.digest

    def add_locked(
        self, locked: LockedLibrary, recipe: Recipe, by_digest: Mapping[str, Sequence[FileGroup]]
    ) -> bool:
        """Give a library of a lock to its recipe; whether it is here, or may be."""
        results = (one for one in self.slimmed if one.entry.original_sha256 == locked.sha256)
        libraries: list[Library] = [*results, *by_digest.get(locked.sha256, ())]
        for library in libraries:
            self.add(library, recipe)
        return bool(libraries) or locked.sha256 in self._damaged or locked.size in self._unread

    def by_digest(self, sizes: Set[int]) -> dict[str, list[FileGroup]]:
        """Files that have one of these sizes in bytes, and no recipe yet, by digest."""
        candidates = [g for g in self.tree.groups if g.size in sizes and self.is_free(g.names)]
        candidates.sort(key=lambda group: -group.size)
        found: defaultdict[str, list[FileGroup]] = defaultdict(list)
        for group, digest in self.tree.digests(candidates, self._jobs).items():
            if digest is not None:
                found[digest].append(group)
            else:
                self._unread.add(group.size)
                row = SlimRow.unchanged(group.name, SlimStatus.FAILED, group.size, UNREADABLE)
                self.settle(group, row)
        return found


def find_by_lock(
    trees: Sequence[tuple[Tree, SlimManifest]],
    lock: Lock,
    *,
    strip: bool,
    others: Recipe | None,
    unloaded: bool = False,
    spare: SparePolicy | None = None,
    spare_unloaded: bool = False,
    keeps_spares: bool,
    jobs: int,
) -> tuple[list[WorkList], list[SlimRow]]:
    """Give the files of folders to the libraries of a lock.

    Args:
        trees: the folders with their manifests.
        lock: what stays.
        strip: whether to drop what is never loaded.
        others: for the other libraries of the lock's distributions and of what they require.
        unloaded: whether those of them that the run of the lock did not load lose all GPU code.
        spare: where removed code goes; None: it is lost.
        spare_unloaded: whether all code that can come back goes of the libraries that the lock and
            the trace of CPU code do not know.
        keeps_spares: a library that has a spare keeps one, also without ``spare``.
        jobs: files to read at a time.

    Returns:
        A work list for each folder, and rows for libraries of the lock that are in none.
    """
    folders = [_Folder(t, manifest, keeps_spares=keeps_spares, jobs=jobs) for t, manifest in trees]
    source = _describe(lock)
    recipes = [by_lock(one, lock.proof.fill, source, strip=strip, spare=spare)
               for one in lock.libraries]  # fmt: skip
    left = {digest for folder in folders for digest in folder.add_left(recipes)}
    sizes = {library.size for library in lock.libraries}
    digests = [(folder, folder.by_digest(sizes)) for folder in folders]
    missing = []
    for locked, recipe in zip(lock.libraries, recipes, strict=True):
        found = [folder.add_locked(locked, recipe, by_digest) for folder, by_digest in digests]
        if not any(found) and recipe.digest not in left:
            missing.append(locked)
    unmet = [_unmet(library, folders) for library in missing]
    never = whole = None
    if unloaded:
        strips = others is not None and others.strips_others
        never = never_loaded(source, strip=strip, strip_others=strips, spare=spare)
    if spare is not None and spare_unloaded:
        whole = never_loaded(source, strip=strip, spare=spare.for_unneeded())
    for folder in folders:
        rules = _Rules(folder, lock, others, never, whole, spare)
        for group, library in folder.libraries():
            answer = rules.answer(group, library)
            if isinstance(answer, SlimRow):
                folder.settle(library, answer)
            elif answer is not None:
                folder.add(library, answer)
    unmet += _add_packages(folders, lock, source, jobs, spare=spare is not None)
    return [folder.work for folder in folders], unmet


class _Rules:
    """What becomes of the libraries that a lock does not name; the first rule's answer counts."""

    def __init__(
        self,
        folder: _Folder,
        lock: Lock,
        others: Recipe | None,
        never: Recipe | None,
        whole: Recipe | None,
        spare: SparePolicy | None,
    ) -> None:
        self._tree = folder.tree
        rows: tuple[LockedLibrary | LeftOut, ...] = (*lock.libraries, *lock.left_out)
        names = (name for row in rows for name in (row.path.rpartition("/")[2], row.soname))
        self._loaded = frozenset(filter(None, names))
        self._left_out = tuple(row.path for row in lock.left_out)
        self._selected = Libraries(include=lock.include, exclude=lock.exclude)
        versions: defaultdict[str, set[str | None]] = defaultdict(set)
        for row in rows:
            if row.distribution is not None:
                versions[normalized(row.distribution)].add(row.version)
        self._others = others
        self._whole = whole
        self._spare = spare
        # Of the lock's distributions and of what they require, by path: what becomes of libraries
        # that were never loaded. In another version, more libraries may be loaded.
        self._never: dict[str, Recipe | None] = {}
        self._owners: dict[str, str] = {}
        for site in folder.tree.sites:
            found = tuple(site.with_requirements(versions)) if others or never else ()
            known = (versions.get(normalized(one.name), {one.version}) for one in found)
            are_same = all(one.version in then for one, then in zip(found, known, strict=True))
            for one in found:
                self._never |= dict.fromkeys(one.libraries, never if are_same else None)
            for one in site.installed():
                self._owners |= dict.fromkeys(one.libraries, one.name)
        loaded_then = () if spare is None or whole is None else spare.loaded or ()
        traced = () if spare is None else spare.traced.values()
        self._contents = {one.sha256 for one in loaded_then}
        self._names = {os.path.basename(path) for one in loaded_then for path in one.paths}  # noqa: PTH119
        sizes = {one.size for one in (*loaded_then, *traced)}
        by_digest = folder.by_digest(sizes) if sizes else {}
        self._rules: tuple[Callable[[_Facts], Recipe | SlimRow | None], ...] = (
            self._contradicts,
            self._not_loaded,
            self._of_lock,
            self._by_trace,
            self._is_kept,
        )
        self._digests = {group: sha256 for sha256, groups in by_digest.items() for group in groups}

    def answer(self, group: FileGroup, library: Library) -> Recipe | SlimRow | None:
        """The recipe for a library, or a row that tells why it stays; None: it is no concern."""
        paths = tuple(str(self._tree.root / name) for name in group.names)
        sha256 = self._digests.get(group)
        if isinstance(library, KnownResult):
            sha256 = library.entry.original_sha256
        facts = _Facts(library, group, paths, sha256, self)
        for rule in self._rules:
            if (answer := rule(facts)) is not None:
                return answer
        return None

    def role_of(self, paths: Sequence[str]) -> Role:
        """What the run of the lock had to do with a library.

        A library in any folder may be loaded in place of one that the run loaded, if they share the
        base name or the soname.
        """
        soname = soname_of(Path(paths[0]))
        if not self._loaded.isdisjoint((soname, *(path.rpartition("/")[2] for path in paths))):
            return Role.LOADED
        owner = next(filter(None, map(self._owners.get, paths)), None)
        is_allowed = is_selected(self._selected, LibraryNames(paths[0], soname, owner))
        return Role.NEVER if is_allowed else Role.KEPT

    def _contradicts(self, facts: _Facts) -> SlimRow | None:
        """The lock leaves it out, so needs it whole, and the result that is here lacks code."""
        library, others = facts.library, self._others
        if not isinstance(library, KnownResult) or not library.entry.gpu_code_removed:
            return None
        kept = may_be_kept(library.entry)
        # If its original was kept, the recipe for others slims that.
        if others is not None and (kept or others.kind is Kind.ARCHS):
            return None
        here = [f"/{(self._tree.root / name).as_posix()}" for name in library.names]
        if not any(path.endswith(f"/{left}") for path in here for left in self._left_out):
            return None
        has_way_back = kept or library.entry.spare is not None
        return library.unchanged(SlimStatus.FAILED, _LEFT_OUT_UNDO if has_way_back else _LEFT_OUT)

    def _not_loaded(self, facts: _Facts) -> Recipe | SlimRow | None:
        """No run is known to have loaded it, by its content and names."""
        if not facts.is_unknown or facts.role is not Role.NEVER:
            return None
        if (reason := runs_below(facts.path, facts.group.names)) is not None:
            return facts.left(reason)
        return self._whole

    def is_unknown(self, facts: _Facts) -> bool:
        """Whether neither run knows a library by content, nor the trace by name."""
        group = facts.group
        if self._whole is None or not self._tree.is_library(group):
            return False
        if isinstance(facts.library, FileGroup) and group.size < MIN_GAIN:
            return False
        names = (name.rpartition("/")[2] for name in group.names)
        return facts.sha256 not in self._contents and self._names.isdisjoint(names)

    def _of_lock(self, facts: _Facts) -> Recipe | None:
        """It belongs to a distribution of the lock, or to one that these require."""
        path = next((path for path in facts.paths if path in self._never), None)
        if path is None:
            return None
        never = self._never[path]
        return never if never is not None and facts.role is Role.NEVER else self._others

    def _by_trace(self, facts: _Facts) -> Recipe | None:
        """Its CPU code was traced."""
        if self._spare is None or facts.sha256 not in self._spare.traced:
            return None
        return by_pages(self._spare)

    def _is_kept(self, facts: _Facts) -> SlimRow | None:
        """It would have lost its code, and the project keeps it."""
        never = any(self._never.get(path) is not None for path in facts.paths)
        takes_cpu_code = self._spare is not None and self._spare.loaded is not None
        if not (never or facts.is_unknown) or facts.role is not Role.KEPT:
            return None
        has_code = (facts.is_unknown and takes_cpu_code) or read_fact(facts.path, has_gpu_code)
        return facts.left(_KEPT) if has_code else None


@dataclass(frozen=True)
class _Facts:
    """A file that a lock does not name, each fact read once: its library, real paths and digest.

    Attributes:
        sha256: of the original; None if a trace knows no library of its size.
    """

    library: Library
    group: FileGroup
    paths: tuple[str, ...]
    sha256: str | None
    rules: _Rules

    @property
    def path(self) -> Path:
        return Path(self.paths[0])

    @functools.cached_property
    def role(self) -> Role:
        return self.rules.role_of(self.paths)

    @functools.cached_property
    def is_unknown(self) -> bool:
        return self.rules.is_unknown(self)

    def left(self, reason: str) -> SlimRow:
        """A row for a library that stays as it is."""
        return SlimRow.unchanged(self.group.name, SlimStatus.LEFT, self.group.size, reason)


def _add_packages(
    folders: Sequence[_Folder], lock: Lock, source: str, jobs: int, *, spare: bool
) -> Iterator[SlimRow]:
    """Add the files of a lock; yield a row for each distribution that is in no folder."""
    for files in lock.files:
        found = False
        for folder in folders:
            packages = list(
                packages_by_lock(
                    folder.tree, folder.manifest, files, source, jobs, is_checked=not spare
                )
            )
            folder.work.add_packages(packages, spare=spare)
            found |= bool(packages)
        if not found and not spare:
            name = f"{files.distribution} {files.version}"
            detail = "it is not here; install it, or lock a run without it"
            yield SlimRow.unchanged(name, SlimStatus.MISSING, files.size, detail)


def find_by_archs(
    tree: Tree, manifest: SlimManifest, recipe: Recipe, *, keep_ptx: bool, keeps_spares: bool
) -> WorkList:
    """Give all libraries of a folder to a recipe; see ``find_by_lock``."""
    folder = _Folder(tree, manifest, keeps_spares=keeps_spares, jobs=1)
    for _, library in folder.libraries():
        folder.add(library, recipe)
    packages = packages_by_archs(tree, manifest, recipe.devices, recipe.source, keep_ptx=keep_ptx)
    folder.work.add_packages(packages, spare=recipe.spare is not None)
    return folder.work


def _unmet(library: LockedLibrary, folders: Sequence[_Folder]) -> SlimRow:
    wanted = f" (of {library.distribution} {library.version})" if library.distribution else ""
    for folder in folders:
        named = [
            (name, group)
            for group in folder.tree.groups
            for name in group.names
            if name.rpartition("/")[2] == library.name and folder.is_free(group.names)
        ]
        # The file that lies where the lock's does, rather than one of the same name elsewhere.
        for name, group in sorted(named, key=lambda found: not library.path.endswith(found[0])):
            folder.take(group)
            path = folder.tree.root / name
            # Of the manifest's results it is known that their originals were other files, too.
            if folder.work.current.isdisjoint(group.names) and is_slimmed(path):
                # What the lock needs of it may be gone.
                detail = _why_unknown(folder.tree.root, path)
                return SlimRow.unchanged(name, SlimStatus.FAILED, group.size, detail)
            detail = (
                f"not the file that was proved{wanted}; left as it is: install that file, or prove "
                "and lock this one"
            )
            return SlimRow.unchanged(name, SlimStatus.DIFFERENT, group.size, detail)
    detail = f"it is not here{wanted}; install it, or lock a run that doesn't load it"
    return SlimRow.unchanged(library.path, SlimStatus.MISSING, library.size, detail)


def _why_unknown(root: Path, path: Path) -> str:
    """Why a slimmed library that is not in the manifest of ``root`` is a problem."""
    detail = "was slimmed before, and no manifest here tells how: install it again"
    if (folder := other_manifest(root, path)) is not None:
        return f"{detail}, or slim the folder of its manifest: {folder}"
    with contextlib.suppress(FormatError):
        if note_of(path) is not None:
            return f"{detail}, or run negativa slim undo, which needs its spare, and then slim"
    return detail


def _describe(lock: Lock) -> str:
    """A lock in words, for people who meet a slimmed library later."""
    proof = lock.proof
    devices = ", ".join(f"{d.name} ({d.compute_capability})" for d in proof.devices)
    proved = "proved" if proof.proved else "NOT PROVED"
    tests = sum(proof.tests.values())
    return (
        f"the lock of run {proof.run}, {proved} by {tests:,} tests on {devices or 'no device'}"
        + (f", {proof.date}" if proof.date else "")
    )


_LATEST = max(OLDEST_DEVICES.values())


def refuse_impossible(tasks: Iterable[Task], devices: Sequence[ComputeCapability]) -> None:
    """Refuse devices that are too old for the CUDA of a library, which has no code for them.

    Later devices are no mistake: they may compile the library's PTX.

    Args:
        tasks: the libraries to slim.
        devices: what the user named.

    Raises:
        OptionError: a library can't have code for one of the devices; nothing was done.
    """
    old = [device for device in devices if device < _LATEST]
    found = [
        text
        for task in tasks
        if old and task.recipe.kind is Kind.ARCHS and (text := _why_impossible(task, old))
    ]
    if found:
        count = format_items(len(found) - 1, "more library", "more libraries")
        more = f" (and {count})" if len(found) > 1 else ""
        raise OptionError(
            f"--arch: {found[0]}{more}; check the name of the arch, or pass --force-arch to slim "
            "all the same"
        )


def _why_impossible(task: Task, old: Sequence[ComputeCapability]) -> str | None:
    try:
        library_map = read_library(task.source, Scope(headers_only=True))
        with ByteSource(task.source) as source:
            major = cuda_major(source, library_map)
    except FormatError:
        return None  # Slimming leaves it alone, and says why.
    oldest = OLDEST_DEVICES.get(major or 0)
    if oldest is None:
        return None
    bad = [d for d in old if d < oldest and not library_map.loaded_starts((d,))]
    if not bad:
        return None
    return (
        f"{task.source} was compiled by CUDA {major}, whose oldest GPUs are {names_of([oldest])}, "
        f"and has no code for {names_of(bad)}"
    )
