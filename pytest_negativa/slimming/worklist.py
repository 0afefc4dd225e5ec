"""Which library of a folder gets which recipe. Reads files, and writes nothing.

Each file goes to the first recipe that asks for it. ``classify`` tells what the recipe makes of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.library import has_gpu_code
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.hostcode import HostLibrary
from pytest_negativa.models.lock import Lock, LockedLibrary
from pytest_negativa.models.slimming import LeftFile, SlimManifest, SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.code_files import (
    Package,
    left_by_lock,
    left_by_spare,
    packages_by_lock,
)
from pytest_negativa.slimming.code_files import find_by_archs as packages_by_archs
from pytest_negativa.slimming.identity import UNREADABLE, why_another
from pytest_negativa.slimming.loaded import Loaded, runs_below
from pytest_negativa.slimming.manifest import (
    digest_of,
    is_original,
    is_result,
    may_be_kept,
    other_manifest,
)
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    ByArchs,
    ByLock,
    ByPages,
    NeverLoaded,
    Recipe,
    Strip,
)
from pytest_negativa.slimming.spares import (
    MIN_GAIN,
    SpareAwayError,
    SparePolicy,
    find_spare,
    note_of,
)
from pytest_negativa.slimming.tree import FileGroup, Tree
from pytest_negativa.storage.records import utf8

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

    def add_packages(self, packages: Iterable[Package]) -> None:
        """Add packages, with the rows that are known of them."""
        for package in packages:
            if (row := package.row_before()) is not None:
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


def classify(
    tree: Tree, library: KnownResult | FileGroup, left: LeftFile | None, recipe: Recipe
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
    if not isinstance(recipe, ByLock) and not tree.is_library(library):
        return None
    # A bind mount shows one name in two folders.
    outside = max(0, library.links - len(library.names))
    source = tree.root / library.name
    return Task(recipe, source, library.names, library.size, outside=outside)


def _classify_slimmed(tree: Tree, library: KnownResult, recipe: Recipe) -> Task | SlimRow:
    entry = library.entry
    if entry.recipe == recipe.digest:
        status, detail = SlimStatus.ALREADY, None
        if isinstance(recipe, NeverLoaded):
            detail = recipe.why(has_gpu_code=entry.gpu_code_removed > 0)
        if entry.spare is not None:
            status, detail = _look_for_spare(tree.root / library.results[0], status, detail)
        return SlimRow(
            path=library.key,
            status=status,
            before=entry.original_size,
            after=entry.size,
            detail=detail,
            others=len(entry.names) - 1,
        )
    if entry.original is not None and digest_of(Path(entry.original)) == entry.original_sha256:
        original = Path(entry.original)
        return Task(recipe, original, library.results, entry.original_size, before=entry)
    if entry.spare is not None:
        source = tree.root / library.results[0]
        size = entry.original_size
        return Task(recipe, source, library.results, size, before=entry, is_cut=True)
    # If GPU code is gone, some of it may be what the recipe keeps.
    if entry.gpu_code_removed and not isinstance(recipe, Strip | NeverLoaded):
        return SlimRow.unchanged(library.key, SlimStatus.FAILED, entry.size, _NOT_AGAIN)
    return SlimRow.unchanged(library.key, SlimStatus.LEFT, entry.size, _IN_ANOTHER_WAY)


def _keep_spare(tree: Tree, library: KnownResult, recipe: Recipe) -> Recipe | SlimRow:
    """The recipe with the spare of a library, without which its original would be lost.

    Returns:
        A row if the library stays as it is.
    """
    entry = library.entry
    if isinstance(recipe, Strip):
        return SlimRow.unchanged(library.key, SlimStatus.LEFT, entry.size, _HAS_SPARE)
    if recipe.spare is not None or not isinstance(recipe, ByLock | ByArchs | NeverLoaded):
        return recipe
    assert entry.spare is not None, "the caller looked"
    path = tree.root / library.results[0]
    try:
        spare = SparePolicy(Path(entry.spare).parent, by_arch=isinstance(recipe, ByArchs))
        if (same := replace(recipe, spare=spare)).digest == entry.recipe:
            return same
        folder = find_spare(path).parent
    except NegativaError as e:
        detail = str(e).removeprefix(f"{path}: ")
        return SlimRow.unchanged(library.key, SlimStatus.FAILED, entry.size, detail)
    real = folder.resolve()
    # As for --spare: no scan enters a folder of spares.
    is_near = tree.root == real or tree.root in real.parents or real in tree.root.parents
    if is_near or utf8(str(folder)) != str(folder):
        return SlimRow.unchanged(library.key, SlimStatus.FAILED, entry.size, _SPARE_NEAR)
    return replace(recipe, spare=replace(spare, folder=folder))


def _look_for_spare(
    path: Path, status: SlimStatus, detail: str | None
) -> tuple[SlimStatus, str | None]:
    """Status and detail of a library that was slimmed before, unless its spare is missing."""
    try:
        find_spare(path)
    except SpareAwayError as e:
        return SlimStatus.SPARE_AWAY, str(e).removeprefix(f"{path}: ")
    except NegativaError as e:
        return SlimStatus.FAILED, str(e).removeprefix(f"{path}: ")
    return status, detail


def _is_left(group: FileGroup, left: LeftFile, recipe: Recipe) -> bool:
    """Whether an earlier run with this recipe left this very file as it is."""
    known = (left.size, left.mtime_ns, left.recipe) == (group.size, group.mtime_ns, recipe.digest)
    strips = isinstance(recipe, ByArchs | NeverLoaded) and recipe.strip_others
    return known and not (strips and left.reason == NO_GPU_CODE)


class _Folder:
    """A tree with its manifest, whose files are given to the recipes.

    Args:
        keeps_spares: a library with a spare is cut anew, also by a recipe without spares.

    Attributes:
        work: what is to be done there.
        slimmed: the libraries whose results are there.
        damaged: digests of the originals of results that were damaged since, or can't be read.
        unread: sizes in bytes of files that can't be read, and may be originals.
        kept: libraries that no test loaded, and that the settings of the project keep.
    """

    def __init__(self, tree: Tree, manifest: SlimManifest, *, keeps_spares: bool) -> None:
        self.tree = tree
        self.manifest = manifest
        self._keeps_spares = keeps_spares
        self.work = WorkList(rows=[*tree.unlisted_rows(), *tree.unnamed_rows()])
        self.slimmed: list[KnownResult] = []
        self.damaged: set[str] = set()
        self.unread: set[int] = set()
        self.kept: list[FileGroup] = []
        self._taken: set[str] = set()
        for key, entry in manifest.slimmed.items():
            results = tuple(name for name in entry.names if is_result(tree, name, entry))
            if results:
                rest = (name for name in entry.names if name not in results)
                originals = tuple(name for name in rest if is_original(tree, name, entry))
                self.slimmed.append(KnownResult(key, entry, results, originals))
                self.work.current.update(results)
            elif damaged := list(_damaged(tree, entry)):
                self.damaged.add(entry.original_sha256)
                for name, group in damaged:
                    self.take(group.names)
                    detail = _DAMAGED_UNDO if may_be_kept(entry) else _DAMAGED
                    self.add_row(SlimRow.unchanged(name, SlimStatus.CHANGED, group.size, detail))
            elif tree.covers(entry.names) and (unread := list(_unreadable(tree, entry))):
                self.damaged.add(entry.original_sha256)
                for group in unread:
                    self.add_unreadable(group)
            # The library may be away for a while, and the entry is the way to the original.
            elif (
                not tree.is_hidden(entry.names)
                and not may_be_kept(entry)
                and tree.covers(entry.names)
            ):
                self.work.stale.append(key)
        self._slimmed_by_name = {name: one for one in reversed(self.slimmed) for name in one.names}

    def is_free(self, names: Iterable[str]) -> bool:
        """Whether no recipe has one of these names yet."""
        return self._taken.isdisjoint(names)

    def take(self, names: Iterable[str]) -> None:
        """Keep these names from other recipes."""
        self._taken.update(names)

    def add_row(self, row: SlimRow) -> None:
        self.work.rows.append(row)

    def add_unreadable(self, group: FileGroup) -> None:
        """Report a file that may be a library to slim, but can't be read."""
        self.take(group.names)
        self.add_row(SlimRow.unchanged(group.name, SlimStatus.FAILED, group.size, UNREADABLE))

    def add(self, library: KnownResult | FileGroup, recipe: Recipe) -> None:
        """Give a library to a recipe, unless another one has it."""
        if not self.is_free(library.names):
            return
        self.take(library.names)
        if isinstance(library, KnownResult) and library.entry.spare and self._keeps_spares:
            kept = _keep_spare(self.tree, library, recipe)
            if isinstance(kept, SlimRow):
                self.add_row(kept)
                return
            recipe = kept
        left = self.manifest.left.get(library.names[0])
        outcome = classify(self.tree, library, left, recipe)
        if isinstance(outcome, Task):
            self.work.tasks.append(outcome)
        elif outcome is not None:
            self.add_row(outcome)
            if isinstance(library, KnownResult) and outcome.status in _IS_THERE:
                links = dict.fromkeys(library.originals, library.results[0])
                self.work.links.update(links)

    def add_kept(self) -> None:
        """Report the libraries that the project keeps, unless a recipe has them."""
        for group in dict.fromkeys(self.kept):
            if self.is_free(group.names):
                self.add_row(SlimRow.unchanged(group.name, SlimStatus.LEFT, group.size, _KEPT))

    def slimmed_of(self, group: FileGroup) -> KnownResult | None:
        """The entry of the manifest that a file belongs to."""
        slimmed = (self._slimmed_by_name.get(name) for name in group.names)
        return next(filter(None, slimmed), None)

    def add_group(self, group: FileGroup, recipe: Recipe) -> None:
        """The same for a file, which may belong to an entry of the manifest."""
        self.add(self.slimmed_of(group) or group, recipe)

    def add_left(self, recipes: Sequence[ByLock]) -> Iterator[str]:
        """Digests of the recipes by which an earlier run left a file that is still there."""
        by_digest = {recipe.digest: recipe for recipe in recipes}
        for name, left in self.manifest.left.items():
            group, recipe = self.tree.group_of(name), by_digest.get(left.recipe)
            if group is not None and recipe is not None and _is_left(group, left, recipe):
                self.add(group, recipe)
                yield recipe.digest

    def add_contradictions(self, loaded: Loaded, others: Recipe | None) -> None:
        """Report results that lack code of libraries that the lock leaves out, so needs whole."""
        if isinstance(others, ByArchs):
            return
        for library in self.slimmed:
            entry = library.entry
            kept = may_be_kept(entry)
            if (
                entry.gpu_code_removed
                and self.is_free(entry.names)
                and any(loaded.is_left_out(self.tree.root / name) for name in entry.names)
                # If its original was kept, the recipe for others slims that.
                and not (others is not None and kept)
            ):
                self.take(entry.names)
                detail = _LEFT_OUT_UNDO if kept or entry.spare is not None else _LEFT_OUT
                self.add_row(SlimRow.unchanged(library.key, SlimStatus.FAILED, entry.size, detail))


def _damaged(tree: Tree, entry: SlimmedFile) -> Iterator[tuple[str, FileGroup]]:
    """The results that were damaged since: a name and the file of each."""
    others: dict[FileGroup, str] = {}
    for name in entry.names:
        group = tree.group_of(name)
        if group is not None and not is_original(tree, name, entry):
            others.setdefault(group, name)
    if not others:
        return
    records = tree.recorded(set(entry.names))
    for group, name in others.items():
        if why_another(tree.root / name, name, entry, records.get(name, {})) is None:
            yield name, group


def _unreadable(tree: Tree, entry: SlimmedFile) -> Iterator[FileGroup]:
    """The files of an entry that can't be read: each may be the result."""
    groups = dict.fromkeys(filter(None, map(tree.group_of, entry.names)))
    return (group for group in groups if digest_of(tree.root / group.name) is None)


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
    folders = [_Folder(tree, manifest, keeps_spares=keeps_spares) for tree, manifest in trees]
    source = _describe(lock)
    recipes = [ByLock(library, lock.proof.fill, strip, source, spare) for library in lock.libraries]
    left = {digest for folder in folders for digest in folder.add_left(recipes)}
    sizes = {library.size for library in lock.libraries}
    digests = [_digests(folder, sizes, jobs) for folder in folders]
    missing: list[LockedLibrary] = []
    for recipe in recipes:
        sha256 = recipe.locked.sha256
        found = recipe.digest in left
        for folder, by_digest in zip(folders, digests, strict=True):
            slimmed = [one for one in folder.slimmed if one.entry.original_sha256 == sha256]
            groups = by_digest.get(sha256, [])
            found |= sha256 in folder.damaged or recipe.locked.size in folder.unread
            found |= bool(slimmed or groups)
            libraries: list[KnownResult | FileGroup] = [*slimmed, *groups]
            for library in libraries:
                folder.add(library, recipe)
        if not found:
            missing.append(recipe.locked)
    unmet = [_unmet(library, folders) for library in missing]
    loaded = Loaded.of(lock)
    never = NeverLoaded(source, strip, _strips_others(others), spare) if unloaded else None
    for folder in folders:
        folder.add_contradictions(loaded, others)
        if spare is not None and spare_unloaded:
            whole = NeverLoaded(source, strip, strip_others=False, spare=spare.for_unneeded())
            _add_unloaded(folder, whole, spare.loaded or (), loaded, jobs)
        _add_others(folder, others, never, loaded)
        if spare is not None:
            _add_traced(folder, spare, jobs)
        folder.add_kept()
    if spare is None:
        unmet += _add_packages(folders, lock, source, jobs)
    else:
        for folder, files in itertools.product(folders, lock.files):
            folder.work.rows += left_by_lock(folder.tree, files)
    return [folder.work for folder in folders], unmet


def _add_packages(
    folders: Sequence[_Folder], lock: Lock, source: str, jobs: int
) -> Iterator[SlimRow]:
    """Add the files of a lock; yield a row for each distribution that is in no folder."""
    for files in lock.files:
        found = False
        for folder in folders:
            packages = list(packages_by_lock(folder.tree, folder.manifest, files, source, jobs))
            folder.work.add_packages(packages)
            found |= bool(packages)
        if not found:
            name = f"{files.distribution} {files.version}"
            detail = "it is not here; install it, or lock a run without it"
            yield SlimRow.unchanged(name, SlimStatus.MISSING, files.size, detail)


def find_by_archs(
    tree: Tree, manifest: SlimManifest, recipe: ByArchs, *, keeps_spares: bool
) -> WorkList:
    """Give all libraries of a folder to a recipe; see ``find_by_lock``."""
    folder = _Folder(tree, manifest, keeps_spares=keeps_spares)
    for group in tree.groups:
        folder.add_group(group, recipe)
    devices, source = recipe.devices, recipe.source
    packages = packages_by_archs(tree, manifest, devices, source, keep_ptx=recipe.keep_ptx)
    if recipe.spare is None:
        folder.work.add_packages(packages)
    else:
        unused = (one for one in packages if one.unused)
        folder.work.rows += (left_by_spare(p.name, len(p.unused), p.size) for p in unused)
    return folder.work


def _digests(folder: _Folder, sizes: Set[int], jobs: int) -> dict[str, list[FileGroup]]:
    """Files that have one of these sizes in bytes, by digest."""
    candidates = [g for g in folder.tree.groups if g.size in sizes and folder.is_free(g.names)]
    candidates.sort(key=lambda group: -group.size)
    found: dict[str, list[FileGroup]] = {}
    # hashlib lets other threads work meanwhile.
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        digests = pool.map(lambda g: digest_of(folder.tree.root / g.name), candidates)
        for group, digest in zip(candidates, digests, strict=True):
            if digest is not None:
                found.setdefault(digest, []).append(group)
            else:
                folder.unread.add(group.size)
                folder.add_unreadable(group)
    finally:
        # A user who interrupts should not wait for large files.
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def _unmet(library: LockedLibrary, folders: Sequence[_Folder]) -> SlimRow:
    wanted = f" (of {library.distribution} {library.version})" if library.distribution else ""
    for folder in folders:
        # The file that lies where the lock's does, rather than one of the same name elsewhere.
        groups = _by_base_name(folder.tree, library.name)
        for name, group in sorted(groups, key=lambda found: not library.path.endswith(found[0])):
            if not folder.is_free(group.names):
                continue
            folder.take(group.names)
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


def _by_base_name(tree: Tree, base_name: str) -> Iterator[tuple[str, FileGroup]]:
    for group in tree.groups:
        for name in group.names:
            if name.rpartition("/")[2] == base_name:
                yield name, group
                break


def _add_others(
    folder: _Folder, others: Recipe | None, never: NeverLoaded | None, loaded: Loaded
) -> None:
    """Add the libraries of the lock's distributions and of what they require."""
    if others is None and never is None:
        return
    for site in folder.tree.sites:
        found = tuple(Site(site).with_requirements(loaded.versions))
        unloaded = never if loaded.are_versions(found) else None
        for installed in found:
            for path in sorted(installed.libraries):
                group = folder.tree.group_of(os.path.relpath(path, folder.tree.root))
                if group is None or not folder.is_free(group.names):
                    continue
                path_here = folder.tree.root / group.name
                is_never = unloaded is not None and loaded.is_never(
                    installed.name, path_here, group.names
                )
                if (
                    unloaded is not None
                    and not is_never
                    and loaded.is_kept(installed.name, path_here, group.names)
                    and _has_gpu_code(path_here)
                ):
                    folder.kept.append(group)
                recipe = unloaded if is_never else others
                if recipe is not None:
                    folder.add_group(group, recipe)


def _add_unloaded(
    folder: _Folder,
    recipe: NeverLoaded,
    traced: Sequence[HostLibrary],
    loaded: Loaded,
    jobs: int,
) -> None:
    """Add the libraries that no run is known to have loaded, by their content and names.

    Args:
        folder: see there.
        recipe: what to do with them.
        traced: the libraries that the run of the trace loaded.
        loaded: those that the run of the lock loaded.
        jobs: files to read at a time.
    """
    tree, takes_cpu_code = folder.tree, recipe.spare is not None and recipe.spare.loaded is not None
    names = {os.path.basename(path) for one in traced for path in one.paths}  # noqa: PTH119
    contents = {one.sha256 for one in traced}
    found = _digests(folder, {one.size for one in traced}, jobs)
    same = {g.name for sha256, groups in found.items() if sha256 in contents for g in groups}
    owners = {
        path: one.name
        for site in tree.sites
        for one in Site(site).installed()
        for path in one.libraries
    }
    for group in tree.groups:
        slimmed = folder.slimmed_of(group)
        known = group.name in same if slimmed is None else slimmed.entry.original_sha256 in contents
        too_small = slimmed is None and group.size < MIN_GAIN
        if known or too_small or not folder.is_free(group.names) or not tree.is_library(group):
            continue
        path = tree.root / group.name
        owner = next(
            (owners[p] for name in group.names if (p := str(tree.root / name)) in owners), None
        )
        if any(name.rpartition("/")[2] in names for name in group.names):
            continue
        if not loaded.is_never(owner, path, group.names):
            if loaded.is_kept(owner, path, group.names) and (takes_cpu_code or _has_gpu_code(path)):
                folder.kept.append(group)
            continue
        if (reason := runs_below(path, group.names)) is not None:
            folder.take(group.names)
            folder.add_row(SlimRow.unchanged(group.name, SlimStatus.LEFT, group.size, reason))
        else:
            folder.add(slimmed or group, recipe)


def _add_traced(folder: _Folder, spare: SparePolicy, jobs: int) -> None:
    """Add the other libraries whose CPU code was traced."""
    recipe = ByPages(spare)
    for slimmed in folder.slimmed:
        if slimmed.entry.original_sha256 in spare.traced:
            folder.add(slimmed, recipe)
    sizes = {one.size for one in spare.traced.values()}
    for sha256, groups in _digests(folder, sizes, jobs).items():
        for group in groups:
            if sha256 in spare.traced:
                folder.add(group, recipe)


def _has_gpu_code(path: Path) -> bool:
    try:
        return has_gpu_code(path)
    except FormatError:
        return False


def _strips_others(others: Recipe | None) -> bool:
    return isinstance(others, Strip) or (isinstance(others, ByArchs) and others.strip_others)


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
