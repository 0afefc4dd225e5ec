"""What is to be done in a folder: which library gets which recipe. Reads, and writes nothing."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.lock import Lock, LockedLibrary
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.identity import why_another
from pytest_negativa.slimming.loaded import Loaded
from pytest_negativa.slimming.manifest import digest_of, is_original, is_result, may_be_kept
from pytest_negativa.slimming.recipes import (
    ALL_NEVER_LOADED,
    NO_GPU_CODE,
    ByArchs,
    ByLock,
    NeverLoaded,
    Recipe,
    Strip,
)
from pytest_negativa.slimming.tree import MANIFEST_NAME, FileGroup, Tree

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
_LEFT_OUT_UNDO = f"{_LEFT_OUT}, or negativa slim undo"


@dataclass(frozen=True, slots=True)
class Work:
    """A library to slim.

    Attributes:
        recipe: what to do.
        source: the original.
        names: what is to lead to the result, below the folder.
        before: what is known of the file that is there, if that was slimmed before.
        outside: how many names the file has that are not in the folder.
    """

    recipe: Recipe
    source: Path
    names: tuple[str, ...]
    size: int
    before: SlimmedFile | None = None
    outside: int = 0

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class Todo:
    """What is to be done in a folder.

    Attributes:
        works: libraries to slim.
        links: names that are to lead to a result that is there: name to name.
        rows: what is known already.
        current: names whose file is a result.
        stale: entries of the manifest whose file is gone or another one.
    """

    works: list[Work] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    rows: list[SlimRow] = field(default_factory=list)
    current: set[str] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Finder:
    """Adds to a ``Todo`` what belongs to one recipe after the other; a file gets the first."""

    tree: Tree
    manifest: SlimManifest
    todo: Todo = field(default_factory=Todo)
    _taken: set[str] = field(default_factory=set)
    _results: dict[str, str] = field(default_factory=dict)
    _damaged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.todo.rows += self.tree.unlisted_rows()
        for key, entry in self.manifest.slimmed.items():
            results = [name for name in entry.names if is_result(self.tree, name, entry)]
            if results:
                self._results[key] = results[0]
                self.todo.current.update(results)
            elif (
                self.tree.covers(entry.names)
                and not self._add_damaged(entry)
                # The library may be away for a while, and the entry is the way to the original.
                and not self.tree.is_hidden(entry.names)
                and not may_be_kept(entry)
            ):
                self.todo.stale.append(key)

    def _add_damaged(self, entry: SlimmedFile) -> bool:
        """Tell of results that were damaged since; whether there are any."""
        others = [
            group
            for name in entry.names
            if (group := self.tree.group_of(name)) and not is_original(self.tree, name, entry)
        ]
        if not others:
            return False
        records = self.tree.recorded(set(entry.names))
        for group in dict.fromkeys(others):
            name = next(name for name in entry.names if name in group.names)
            path = self.tree.root / name
            if why_another(path, name, entry, records.get(name, {})) is not None:
                continue
            self._taken.update(group.names)
            self._damaged.add(entry.original_sha256)
            self.todo.rows.append(
                SlimRow(
                    path=name,
                    status=SlimStatus.CHANGED,
                    before=group.size,
                    after=group.size,
                    why=_DAMAGED_UNDO if may_be_kept(entry) else _DAMAGED,
                )
            )
        return bool(self._taken.intersection(entry.names))

    def is_damaged(self, sha256: str) -> bool:
        """Whether a result that was made of an original with this digest is damaged."""
        return sha256 in self._damaged

    def is_free(self, group: FileGroup) -> bool:
        return not self._taken.intersection(group.names)

    def add_results(self, sha256: str, recipe: Recipe) -> bool:
        """What was slimmed before, of an original with this digest; whether there is any."""
        found = False
        for key, result in self._results.items():
            entry = self.manifest.slimmed[key]
            if entry.original_sha256 == sha256 and not self._taken.intersection(entry.names):
                found = True
                self._add_result(key, entry, result, recipe)
        return found

    def _add_result(self, key: str, entry: SlimmedFile, result: str, recipe: Recipe) -> None:
        self._taken.update(entry.names)
        if entry.recipe == recipe.digest:
            self.todo.rows.append(
                SlimRow(
                    path=key,
                    status=SlimStatus.ALREADY,
                    before=entry.original_size,
                    after=entry.size,
                    why=ALL_NEVER_LOADED if entry.never_loaded and entry.gpu_code_removed else None,
                    others=len(entry.names) - 1,
                )
            )
            for name in entry.names:
                # A run that was killed between the names of one file.
                if name not in self.todo.current and is_original(self.tree, name, entry):
                    self.todo.links[name] = result
        elif entry.original is not None and digest_of(Path(entry.original)) == (
            entry.original_sha256
        ):
            names = tuple(name for name in entry.names if name in self.todo.current)
            self.todo.works.append(
                Work(recipe, Path(entry.original), names, entry.original_size, entry)
            )
        else:
            # Where GPU code is gone, some of it may be what the recipe keeps.
            harmless = not entry.gpu_code_removed or isinstance(recipe, Strip | NeverLoaded)
            self.todo.rows.append(
                SlimRow(
                    path=key,
                    status=SlimStatus.LEFT if harmless else SlimStatus.FAILED,
                    before=entry.size,
                    after=entry.size,
                    why=_IN_ANOTHER_WAY if harmless else _NOT_AGAIN,
                )
            )

    def add_result_by_name(self, group: FileGroup, recipe: Recipe) -> bool:
        """The same for the file of a name, whatever it was made from."""
        for key, entry in self.manifest.slimmed.items():
            if key in self._results and set(entry.names) & set(group.names):
                if self.is_free(group):
                    self._add_result(key, entry, self._results[key], recipe)
                return True
        return False

    def add_contradictions(self, loaded: Loaded, others: Recipe | None) -> None:
        """Results that lack code, of libraries that the lock leaves out, so that all must stay."""
        if isinstance(others, ByArchs):
            return
        for key in self._results:
            entry = self.manifest.slimmed[key]
            if (
                not entry.gpu_code_removed
                or self._taken.intersection(entry.names)
                or not any(loaded.is_left_out(self.tree.root / name) for name in entry.names)
                # Made anew from that.
                or (others is not None and may_be_kept(entry))
            ):
                continue
            self._taken.update(entry.names)
            self.todo.rows.append(
                SlimRow(
                    path=key,
                    status=SlimStatus.FAILED,
                    before=entry.size,
                    after=entry.size,
                    why=_LEFT_OUT_UNDO if may_be_kept(entry) else _LEFT_OUT,
                )
            )

    def add_left(self, group: FileGroup, recipe: Recipe) -> bool:
        """Whether it was looked at before and left; then that is known again."""
        left = self.manifest.left.get(group.name)
        if left is None or (left.size, left.mtime_ns, left.recipe) != (
            group.size,
            group.mtime_ns,
            recipe.digest,
        ):
            return False
        if (
            left.reason == NO_GPU_CODE
            and isinstance(recipe, ByArchs | NeverLoaded)
            and recipe.strip_others
        ):
            return False
        self._taken.update(group.names)
        if left.reason != NO_GPU_CODE:
            self.todo.rows.append(
                SlimRow(
                    path=group.name,
                    status=SlimStatus.LEFT,
                    before=group.size,
                    after=group.size,
                    why=left.reason,
                )
            )
        return True

    def add_all_left(self, recipes: Sequence[ByLock]) -> Iterator[ByLock]:
        """Those of the recipes under which something was looked at before and left."""
        known = {recipe.digest: recipe for recipe in recipes}
        for name, left in self.manifest.left.items():
            group = self.tree.group_of(name)
            recipe = known.get(left.recipe)
            if group is not None and recipe is not None and self.add_left(group, recipe):
                yield recipe

    def add_work(self, group: FileGroup, recipe: Recipe) -> None:
        self._taken.update(group.names)
        self.todo.works.append(
            Work(
                recipe,
                self.tree.root / group.name,
                group.names,
                group.size,
                outside=group.links - len(group.names),
            )
        )

    def take(self, group: FileGroup) -> None:
        """Nobody else is to have it."""
        self._taken.update(group.names)


def find_by_lock(
    trees: Sequence[tuple[Tree, SlimManifest]],
    lock: Lock,
    *,
    strip: bool,
    others: Recipe | None,
    unloaded: bool = False,
    jobs: int,
) -> tuple[list[Todo], list[SlimRow]]:
    """What a lock asks for in each folder; and rows for libraries that are in none of them.

    ``others`` is for the other libraries of the lock's distributions and of what they require;
    with ``unloaded``, those that the run of the lock did not load lose all their GPU code.
    """
    finders = [_Finder(tree, manifest) for tree, manifest in trees]
    source = _describe(lock)
    recipes = [ByLock(library, lock.proof.fill, strip, source) for library in lock.libraries]
    looked_at = {recipe.digest for finder in finders for recipe in finder.add_all_left(recipes)}
    digests = [_digests(finder, lock, jobs) for finder in finders]
    missing: list[LockedLibrary] = []
    for recipe in recipes:
        sha256 = recipe.locked.sha256
        found = recipe.digest in looked_at
        for finder, by_digest in zip(finders, digests, strict=True):
            found |= finder.add_results(sha256, recipe) or finder.is_damaged(sha256)
            for group in by_digest.get(sha256, ()):
                found = True
                if finder.is_free(group):
                    finder.add_work(group, recipe)
        if not found:
            missing.append(recipe.locked)
    unmet = [_unmet(library, finders) for library in missing]
    loaded = Loaded.of(lock)
    never = NeverLoaded(source, strip, _strips_others(others)) if unloaded else None
    for finder in finders:
        finder.add_contradictions(loaded, others)
        _add_others(finder, others, never, loaded)
    return [finder.todo for finder in finders], unmet


def find_by_archs(
    tree: Tree,
    manifest: SlimManifest,
    recipe: ByArchs,
) -> Todo:
    """All libraries of a folder."""
    finder = _Finder(tree, manifest)
    for group in tree.groups:
        if (
            finder.is_free(group)
            and not finder.add_result_by_name(group, recipe)
            and not finder.add_left(group, recipe)
            and tree.is_library(group)
        ):
            finder.add_work(group, recipe)
    return finder.todo


def _digests(finder: _Finder, lock: Lock, jobs: int) -> dict[str, list[FileGroup]]:
    """Files that have the size of a locked library, by digest."""
    sizes = {library.size for library in lock.libraries}
    candidates = [g for g in finder.tree.groups if g.size in sizes and finder.is_free(g)]
    candidates.sort(key=lambda group: -group.size)
    found: dict[str, list[FileGroup]] = {}
    # hashlib lets other threads work meanwhile.
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        digests = pool.map(lambda g: digest_of(finder.tree.root / g.name), candidates)
        for group, digest in zip(candidates, digests, strict=True):
            if digest is not None:
                found.setdefault(digest, []).append(group)
    finally:
        # Whoever interrupts doesn't wait for large files.
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def _unmet(library: LockedLibrary, finders: Sequence[_Finder]) -> SlimRow:
    wanted = f"{library.distribution} {library.version}" if library.distribution else "the lock's"
    for finder in finders:
        # The file that lies where the lock's does, rather than one of the same name elsewhere.
        groups = _by_base_name(finder.tree, library.name)
        for name, group in sorted(groups, key=lambda found: not library.path.endswith(found[0])):
            if not finder.is_free(group):
                continue
            finder.take(group)
            path = finder.tree.root / name
            # Of one that the manifest has, it is known that it was another file before, too.
            unknown = finder.todo.current.isdisjoint(group.names) and is_slimmed(path)
            return SlimRow(
                path=name,
                # What the lock needs of it may be gone.
                status=SlimStatus.FAILED if unknown else SlimStatus.DIFFERENT,
                before=group.size,
                after=group.size,
                why=_why_unknown(finder.tree.root, path)
                if unknown
                else f"not the file that was proved, which is that of {wanted}; left as it is",
            )
    return SlimRow(
        path=library.path,
        status=SlimStatus.MISSING,
        before=library.size,
        after=library.size,
        why=f"it is not here; expected that of {wanted}",
    )


def _why_unknown(root: Path, path: Path) -> str:
    """What to do about a slimmed library that the manifest of ``root`` doesn't have."""
    why = "was slimmed before, and no manifest here tells how: install it again"
    folders = (f for f in path.parents if f != root and (f / MANIFEST_NAME).is_file())
    folder = next(folders, None)
    return why if folder is None else f"{why}, or slim the folder of its manifest: {folder}"


def _by_base_name(tree: Tree, base_name: str) -> Iterator[tuple[str, FileGroup]]:
    for group in tree.groups:
        for name in group.names:
            if name.rpartition("/")[2] == base_name:
                yield name, group
                break


def _add_others(
    finder: _Finder, others: Recipe | None, never: NeverLoaded | None, loaded: Loaded
) -> None:
    """The libraries of the lock's distributions and of what they require, but for those taken."""
    if others is None and never is None:
        return
    for site in finder.tree.sites:
        found = tuple(Site(site).with_requirements(loaded.versions))
        unloaded = never if loaded.are_versions(found) else None
        for installed in found:
            for path in sorted(installed.libraries):
                group = finder.tree.group_of(os.path.relpath(path, finder.tree.root))
                if group is None or not finder.is_free(group):
                    continue
                is_never = unloaded is not None and loaded.is_never(
                    installed, finder.tree.root / group.name, group.names
                )
                recipe = unloaded if is_never else others
                if (
                    recipe is not None
                    and not finder.add_result_by_name(group, recipe)
                    and not finder.add_left(group, recipe)
                    and finder.tree.is_library(group)
                ):
                    finder.add_work(group, recipe)


def _strips_others(others: Recipe | None) -> bool:
    return isinstance(others, Strip) or (isinstance(others, ByArchs) and others.strip_others)


def _describe(lock: Lock) -> str:
    """A lock for people who meet a slimmed library later."""
    proof = lock.proof
    devices = ", ".join(f"{d.name} ({d.compute_capability})" for d in proof.devices)
    proved = "proved" if proof.proved else "NOT PROVED"
    tests = sum(proof.tests.values())
    return (
        f"the lock of run {proof.run}, {proved} by {tests:,} tests on {devices or 'no device'}"
        + (f", {proof.date}" if proof.date else "")
    )
