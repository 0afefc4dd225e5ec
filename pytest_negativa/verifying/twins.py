"""Other files with the content of an original, which a process may load instead."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity

# No process loads a library from there, and some have very many files.
_NOT_SEARCHED = frozenset({".git", "__pycache__", "node_modules"})
_NO_FILES = frozenset({"/dev", "/proc", "/sys"})


def find_twins(
    folders: Iterable[str | os.PathLike[str]],
    originals: Iterable[LibraryIdentity],
    apart_from: Iterable[str | os.PathLike[str]] = (),
) -> dict[str, str]:
    """By real path of another file with the content of an original: the original.

    The lock is applied by content, so ``slim`` takes code out of these files, too. Hard links are
    no other files. Links in the folders are not followed.

    Args:
        folders: where to look, at any depth.
        apart_from: folders that are left out.
    """
    wanted: dict[int, dict[str, str]] = defaultdict(dict)
    known = set()
    for original in originals:
        if original.sha256 is not None:
            wanted[original.size][original.sha256] = original.path
            with contextlib.suppress(OSError):
                status = os.stat(original.path)  # noqa: PTH116
                known.add((status.st_dev, status.st_ino))
    twins: dict[str, str] = {}
    for entry in _files(map(os.path.realpath, folders), {*map(os.path.realpath, apart_from)}):
        with contextlib.suppress(OSError, FormatError):
            status = entry.stat(follow_symlinks=False)
            if status.st_size in wanted and (status.st_dev, status.st_ino) not in known:
                with ByteSource(entry.path) as source:
                    twin_of = wanted[status.st_size].get(source.sha256())
                if twin_of is not None:
                    twins[entry.path] = twin_of
    return twins


def _files(folders: Iterable[str], seen: set[str]) -> Iterator[os.DirEntry[str]]:
    """The regular files below some folders, each once."""
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        if folder in seen or folder in _NO_FILES:
            continue
        seen.add(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry
                elif entry.is_dir(follow_symlinks=False) and entry.name not in _NOT_SEARCHED:
                    waiting.append(entry.path)
