"""Files that are GPU code themselves: which of them slimming removes; a row for those alike.

An empty file in the place would be worse: a program that finds it reads wrong content, whereas one
that finds no file says so, or gets it from elsewhere. RECORD keeps the rows, so that the installer
still knows of the files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_negativa.installed.record import record_digest
from pytest_negativa.installed.sites import SITE_NAMES
from pytest_negativa.models.file_kinds import CODE_SUFFIXES, is_loadable
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import normalized
from pytest_negativa.slimming.recipes import Recipe, for_others, lock_in_words, remove_file
from pytest_negativa.slimming.request import SlimRequest
from pytest_negativa.slimming.tree import FileGroup
from pytest_negativa.slimming.worklist import Task, WorkList
from pytest_negativa.storage.system import head_of

_NOT_AGAIN = (
    "removed before, by another lock or for other archs, and this one may keep it: put it back "
    "(negativa slim undo), or install it again, then slim"
)
_NO_SPARE = (
    "unused GPU code, but a spare brings pages back, and no files; slim their folder without "
    "--spare to remove them"
)
_CHANGED = "another content than in RECORD, so not what was proved"


def add_files(folders: Sequence[WorkList], request: SlimRequest) -> Iterator[SlimRow]:
    """Add the files that no program needs to the work in folders.

    Args:
        folders: the work in each.
        request: what stays.

    Yields:
        A row for each distribution of a lock that is in no folder.
    """
    # A single file has no distribution, and may be needed by what lies beside it.
    whole = [folder for folder in folders if not folder.tree.partial]
    if request.lock is None:
        recipe = for_others(request)
        assert recipe is not None
        for folder in whole:
            _add_by_archs(folder, recipe)
        return
    source = lock_in_words(request.lock)
    for locked in request.lock.files:
        found = [_add_by_lock(folder, locked, source) for folder in whole]
        if not any(found) and request.options.spare is None:
            name = f"{locked.distribution} {locked.version}"
            detail = "it is not here; install it, or lock a run without it"
            yield SlimRow.unchanged(name, SlimStatus.MISSING, locked.size, detail)


def _add_by_archs(folder: WorkList, recipe: Recipe) -> None:
    """Add the files that no device of a recipe can load."""
    unused = []
    for group in folder.tree.groups:
        path = folder.tree.root / group.name
        # Under another name the file may be anything to a program, or a backup.
        if all(name.endswith(CODE_SUFFIXES) for name in group.names):
            head = head_of(path)
            if is_loadable(head) and not recipe.keeps_file(path, head):
                unused.append(group)
    removal = remove_file(recipe.source, recipe.key)
    gone = folder.removed.items()
    needed = {name: entry.recipe != removal.digest for name, entry in gone}
    _add(folder, removal, unused, needed)


def _add_by_lock(folder: WorkList, locked: LockedLibrary, source: str) -> bool:
    """Add the files of a lock's distribution; False: the folder has no such distribution."""
    tree, wanted = folder.tree, normalized(locked.distribution or "")
    found = (one for site in tree.sites for one in site.installed if one.code_files)
    named = [one for one in found if normalized(one.name) == wanted]
    same = [one for one in named if one.code_digest == locked.sha256]
    kept = sorted(str(code.detail) for code in locked.kept)
    removal = remove_file(source, ("files", locked.sha256, kept))
    for one in same:
        # The names in the lock of the files here.
        names = {os.path.relpath(one.site / name, tree.root): name for name in one.code_files}
        unused = [
            group
            for group in dict.fromkeys(filter(None, map(tree.group_of, names)))
            # Any name of the file may be what a program opens.
            if all(name in names and names[name] not in kept for name in group.names)
            and is_loadable(head_of(tree.root / group.name))
        ]
        lines, changed = one.code_files, set()
        for group, sha256 in tree.digests(unused, folder.options.jobs).items():
            digests = {lines[names[name]].digest for name in group.names}
            if sha256 is None or digests != {record_digest(sha256)}:
                changed.add(group)
                folder.add_unchanged(group.name, SlimStatus.LEFT, group.size, _CHANGED)
        unused = [group for group in unused if group not in changed]
        gone = folder.removed.keys() & names
        _add(folder, removal, unused, {name: names[name] in kept for name in gone})
    if named and not same:
        detail = (
            f"not the files that were proved (of {locked.distribution} {locked.version}); left as "
            "they are: install these, or prove and lock the ones here"
        )
        name = f"{named[0].name} {named[0].version}"
        folder.add_unchanged(name, SlimStatus.DIFFERENT, 0, detail)
    return bool(named)


def _add(
    folder: WorkList, removal: Recipe, unused: Iterable[FileGroup], gone: Mapping[str, bool]
) -> None:
    """Add files to the work in a folder.

    Args:
        folder: the work.
        removal: why they go.
        unused: the files.
        gone: names of those that were removed before, and whether one may be needed now.
    """
    if folder.options.spare is not None:
        for group in unused:
            folder.add_unchanged(group.name, SlimStatus.LEFT, group.size, _NO_SPARE)
        return
    for group in unused:
        folder.tasks.append(Task(removal, folder.tree.root / group.name, group.names, group.size))
    for name, is_needed in gone.items():
        status, detail = SlimStatus.ALREADY, None
        if is_needed:
            status, detail = SlimStatus.FAILED, _NOT_AGAIN
        before = folder.removed[name].original_size
        folder.rows.append(SlimRow(path=name, status=status, before=before, after=0, detail=detail))


def together(rows: Iterable[SlimRow]) -> Iterator[SlimRow]:
    """Rows of a folder's libraries and files; thousands of files of a package may fare alike.

    Yields:
        The rows of libraries, and one for the files of each package and status.
    """
    alike: defaultdict[tuple[str, SlimStatus], list[SlimRow]] = defaultdict(list)
    for row in rows:
        if row.path.endswith(CODE_SUFFIXES):
            alike[_package_of(row.path), row.status].append(row)
        else:
            yield row
    for (name, status), same in alike.items():
        before, after = sum(row.before for row in same), sum(row.after for row in same)
        detail = next((row.detail for row in same if row.detail), None)
        if detail is None:
            detail = format_items(len(same), "file", "files") + (" removed" if not after else "")
        elif len(same) > 1:
            more = format_items(len(same) - 1, "more file", "more files")
            detail = f"{detail} (and {more})"
        yield SlimRow(path=name, status=status, before=before, after=after, detail=detail)


def _package_of(name: str) -> str:
    """The package, or the uppermost folder, that a file below a root lies in."""
    *folders, _ = name.split("/")
    start = next((i + 1 for i, folder in enumerate(folders) if folder in SITE_NAMES), 0)
    return "/".join(folders[: start + 1] or ".") + "/"
