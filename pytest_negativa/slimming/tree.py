"""What lies in a folder: files by inode with all their names, sites, and what killed runs left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_negativa.errors import OptionError
from pytest_negativa.slimming.sites import find_site

MANIFEST_NAME = "negativa-slim.json"
"""Of the manifest, in the folder that is slimmed."""

ORIGINALS_MARK = ".negativa-originals"
"""An empty file in a folder of kept originals, which no scan enters."""

STAGED_SUFFIX = ".negativa-slim"
"""Ends the hidden names of files that are to take a library's place; the writer adds its own."""

_LEFTOVER = re.compile(rf"\..+{re.escape(STAGED_SUFFIX)}(\..+\.tmp)?", re.DOTALL)
_METADATA_SUFFIX = ".dist-info"
_ELF_MAGIC = b"\x7fELF"
_SHARED_OBJECT = (3).to_bytes(2, "little")
_E_TYPE = 16


@dataclass(frozen=True, slots=True)
class FileGroup:
    """A regular file with the names that it has below a folder, sorted, with ``/``.

    Attributes:
        links: how many names it has in all.
    """

    names: tuple[str, ...]
    size: int
    mtime_ns: int
    links: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class Tree:
    """A folder, or single files of it, as it was found.

    Attributes:
        root: real path of the folder; names are below it.
        groups: its files, by name.
        sites: folders that distributions are installed in.
        leftovers: what runs that were killed have left.
    """

    root: Path
    groups: list[FileGroup] = field(default_factory=list)
    sites: list[Path] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    partial: bool = False
    _by_name: dict[str, FileGroup] = field(default_factory=dict)

    def add(self, found: Iterable[list[tuple[str, os.stat_result]]]) -> None:
        """Take up files, each by its names and their status."""
        for names in found:
            status = names[0][1]
            group = FileGroup(
                names=tuple(sorted(name for name, _ in names)),
                size=status.st_size,
                mtime_ns=status.st_mtime_ns,
                links=status.st_nlink,
            )
            self.groups.append(group)
            self._by_name.update(dict.fromkeys(group.names, group))
        self.groups.sort(key=lambda group: group.names)

    def group_of(self, name: str) -> FileGroup | None:
        return self._by_name.get(name)

    def covers(self, names: Sequence[str]) -> bool:
        """Whether the tree can tell what became of a file of these names."""
        return not self.partial or any(name in self._by_name for name in names)

    def is_library(self, group: FileGroup) -> bool:
        """Whether it is a shared object, by name and by its first bytes."""
        if ".so" not in os.path.basename(group.name):  # noqa: PTH119
            return False
        try:
            with open(self.root / group.name, "rb", buffering=0) as file:  # noqa: PTH123
                start = file.read(_E_TYPE + 2)
        except OSError:
            return False
        return start[:4] == _ELF_MAGIC and start[_E_TYPE:] == _SHARED_OBJECT


def scan_folder(folder: Path) -> Tree:
    """All regular files below a folder. Links to folders are not followed.

    Raises:
        OptionError: it can't be listed.
    """
    root = folder.resolve()
    tree = Tree(root)
    found: dict[tuple[int, int], list[tuple[str, os.stat_result]]] = {}
    sites: set[Path] = set()
    for name, entry in _walk(root):
        status = entry.stat(follow_symlinks=False)
        found.setdefault((status.st_dev, status.st_ino), []).append((name, status))
        if name.endswith(f"{_METADATA_SUFFIX}/RECORD"):
            sites.add(root.joinpath(name).parents[1])
        elif _LEFTOVER.fullmatch(entry.name):
            tree.leftovers.append(root / name)
    if (above := find_site(root / MANIFEST_NAME)) is not None:
        sites.add(above)
    tree.add(found.values())
    tree.sites = sorted(sites)
    return tree


def scan_files(files: Sequence[Path]) -> list[Tree]:
    """A tree for each folder that holds some of the files; other names in it count, too."""
    by_folder: dict[Path, set[tuple[int, int]]] = {}
    for file in files:
        real = file.resolve()
        status = real.stat()
        by_folder.setdefault(real.parent, set()).add((status.st_dev, status.st_ino))
    trees = []
    for folder, wanted in sorted(by_folder.items()):
        found: dict[tuple[int, int], list[tuple[str, os.stat_result]]] = {}
        tree = Tree(folder, partial=True)
        for entry in os.scandir(folder):
            if not entry.is_file(follow_symlinks=False):
                continue
            status = entry.stat(follow_symlinks=False)
            if (status.st_dev, status.st_ino) in wanted:
                found.setdefault((status.st_dev, status.st_ino), []).append((entry.name, status))
            elif _LEFTOVER.fullmatch(entry.name):
                tree.leftovers.append(folder / entry.name)
        tree.add(found.values())
        site = find_site(folder / MANIFEST_NAME)
        tree.sites = [] if site is None else [site]
        trees.append(tree)
    return trees


def _walk(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(root / below) as entries:
                listed = list(entries)
        except OSError as e:
            if not below:
                raise OptionError(f"{root}: cannot be listed: {e.strerror}") from e
            continue
        # Found by their digest, kept originals would be slimmed as well.
        if any(entry.name == ORIGINALS_MARK for entry in listed):
            continue
        for entry in listed:
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                # Compiled Python alone: half of the files, and none of ours.
                if entry.name != "__pycache__":
                    waiting.append(f"{name}/")
            elif entry.is_file(follow_symlinks=False) and _is_utf8(name):
                yield name, entry


def _is_utf8(name: str) -> bool:
    # The manifest is JSON; nothing that we could be after has such a name.
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
