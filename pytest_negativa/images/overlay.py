"""The file tree of image layers: whiteouts, opaque folders, hard links, at most 40 links.

Sources: "Image Layer Filesystem Changeset" of the OCI, and ``applyNaive`` of containerd's package
``archive``. Links on the way to a file are followed as in a changed root: with ``lib -> usr/lib``
below, ``lib/x.so`` becomes ``usr/lib/x.so``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

WHITEOUT = ".wh."
"""Begins the name of an empty file which says that another one of lower layers is gone."""
OPAQUE = ".wh..wh..opq"
"""Name of an empty file which says that the folder's content in lower layers is gone."""

MAX_LINKS = 40
"""As many links in one path as Linux follows (path_resolution(7))."""

FileT = TypeVar("FileT")


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class HardLink(NamedTuple):
    """Another name of the file at a path."""

    target: str


@dataclass(slots=True)
class Folder(Generic[FileT]):
    """A folder; ``path`` is that below the root."""

    path: str = ""
    children: dict[str, Folder[FileT] | Link | FileT] = field(default_factory=dict)

    def path_of(self, name: str) -> str:
        """The path of a child."""
        return f"{self.path}/{name}" if self.path else name


Layer: TypeAlias = Mapping[str, "FileT | Link | HardLink | None"]
"""Content of a layer, by path and in its order; None is a folder."""


@dataclass(slots=True)
class Overlay(Generic[FileT]):
    """A tree of names and inodes: all hard links to a file have the same object.

    Attributes:
        placed: each file that was ever in the tree.
    """

    placed: set[FileT] = field(default_factory=set)
    _root: Folder[FileT] = field(default_factory=Folder)

    def unpack(self, layer: Layer[FileT]) -> list[str]:
        """Unpack a layer; returns the paths of hard links that lead nowhere."""
        # These hide files of lower layers alone, wherever they stand.
        for path in layer:
            folder, _, name = path.rpartition("/")
            if name == OPAQUE:
                self.folder(folder, make=True).children.clear()
            elif name.startswith(WHITEOUT):
                self.folder(folder, make=True).children.pop(name.removeprefix(WHITEOUT), None)
        lost = []
        for path, node in layer.items():
            folder, _, name = path.rpartition("/")
            if name.startswith(WHITEOUT):
                continue
            here = self.folder(folder, make=True)
            file = self._find(node.target) if isinstance(node, HardLink) else node
            if node is None:
                _enter(here, name)
            elif file is None:
                lost.append(path)
                here.children.pop(name, None)
            else:
                here.children[name] = file
                if not isinstance(file, Link):
                    self.placed.add(file)
        return lost

    def walk(self) -> Iterator[tuple[str, Link | FileT]]:
        """Paths of files and links; those in a folder come before those in its folders."""
        waiting = [self._root]
        while waiting:
            here = waiting.pop()
            folders = []
            for name, node in sorted(here.children.items(), key=lambda child: child[0]):
                if isinstance(node, Folder):
                    folders.append(node)
                else:
                    yield here.path_of(name), node
            waiting += reversed(folders)

    def _find(self, path: str) -> FileT | Link | None:
        """The file or link at a path; a link itself is not followed."""
        folder, _, name = path.rpartition("/")
        node = self.folder(folder).children.get(name)
        return None if isinstance(node, Folder) else node

    def folder(self, path: str, *, make: bool = False) -> Folder[FileT]:
        """The folder at a path, behind all links as in a changed root (chroot(2)).

        Args:
            make: if it is none, it becomes one.
        """
        trail, links = [self._root], 0
        waiting = path.split("/")[::-1]
        while waiting:
            part = waiting.pop()
            if part == "..":
                del trail[max(1, len(trail) - 1) :]
            elif part not in ("", "."):
                node = trail[-1].children.get(part)
                if isinstance(node, Link) and links < MAX_LINKS:
                    links += 1
                    del trail[1 if node.target.startswith("/") else len(trail) :]
                    waiting += node.target.split("/")[::-1]
                else:
                    # The link of a loop becomes a folder, too: what lies behind it is shown.
                    trail.append(_enter(trail[-1], part, make=make))
        return trail[-1]


def _enter(folder: Folder[FileT], name: str, *, make: bool = True) -> Folder[FileT]:
    """The folder of that name in a folder. It takes the place of a file or link."""
    node = folder.children.get(name)
    if isinstance(node, Folder):
        return node
    entered: Folder[FileT] = Folder(folder.path_of(name))
    if make:
        folder.children[name] = entered
    return entered
