"""Files that slim finds: hard links, sonames, owners, sites, RECORD; which are libraries."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from pytest_negativa.errors import FormatError, OptionError, StoreError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import ET_DYN
from pytest_negativa.gpucode.library import has_gpu_code
from pytest_negativa.gpucode.source import ByteSource, digest_of, read_fact
from pytest_negativa.installed.conda import CONDA_META
from pytest_negativa.installed.record import RECORD
from pytest_negativa.installed.sites import (
    METADATA_SUFFIXES,
    Installed,
    Site,
    find_prefix,
    find_site,
)
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.file_state import FileState
from pytest_negativa.pages.note import Note
from pytest_negativa.rewriting.compact.rebuild import read_note
from pytest_negativa.storage.atomic import TEMPORARY_SUFFIX
from pytest_negativa.storage.records import utf8

MANIFEST_NAME = "negativa-slim.json"
"""Name of the manifest, in the folder that is slimmed."""

ORIGINALS_MARK = ".negativa-originals"
"""A file in a folder of kept originals or spares, which no scan enters. With spares, it has owners.
"""

STAGED_SUFFIX = ".negativa-slim"
"""Ends the hidden names of files that will replace another; their writer adds a suffix."""

_LONGEST_STAGED = 150
"""Bytes of a name that a hidden name can begin with: with all that follows it has 255 at most."""

Records = Mapping[str, Path]
"""The digests that RECORD files have for a library now, and which RECORD has each."""

_NO_LIBRARY = (
    "not a shared library (ELF, *.so*); slim takes folders, libraries, and one wheel with "
    "--target; of an image or a conda package, slim the folder of its files while it is built"
)
_TEMPORARY = re.compile(
    rf"\..+\.[0-9a-f]{{16}}{re.escape(STAGED_SUFFIX)}(\..+\{TEMPORARY_SUFFIX})?", re.DOTALL
)
# A search in each of a hundred thousand names would take as long as listing them.
_METADATA_ENDS = (f"/{RECORD}", ".json")
_METADATA = re.compile(rf"(\.dist-info/{RECORD}|(^|/){CONDA_META}/[^/]+\.json)$")
_LIBRARY_NAME = re.compile(r"\.so(\.|$)")
_SHARED_OBJECT = ET_DYN.to_bytes(2, "little")
# Of e_type in the header.
_E_TYPE = 16


def staged_name(path: Path, token: str) -> Path:
    """A hidden name beside ``path`` for the file that is to take its place.

    Args:
        path: the place.
        token: of the run.
    """
    name = path.name
    if len(os.fsencode(name)) > _LONGEST_STAGED:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(f".{name}.{token}{STAGED_SUFFIX}")


@dataclass(frozen=True, slots=True)
class FileGroup:
    """A regular file with the names that it has below a folder, sorted, with ``/``.

    Attributes:
        state: as it was found.
        links: how many names it has in all.
    """

    names: tuple[str, ...]
    state: FileState
    links: int

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def base_names(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.names}

    @property
    def size(self) -> int:
        """Bytes."""
        return self.state.size


class Facts:
    """The facts of a file that may be a library, read in one opening.

    Args:
        path: of the file.
        searched: look for GPU code, which reads much of some libraries.
        hashed: read all of it for its digest.

    Attributes:
        sha256: hex digest of a file that was ``hashed``; None: it can't be read.
        is_library: it is a shared object by its first bytes; if it can't be read, by its name.
        is_slimmed: it has the marker of slimming.
        soname: None: it has none, or can't be read.
        has_gpu_code: None: that is not known.
        note: of a library with a spare, about itself.
        problem: why a file that may be a library can't be read.
    """

    sha256: str | None = None
    is_library = is_slimmed = False
    soname: str | None = None
    has_gpu_code: bool | None = None
    note: Note | None = None
    problem: str | None = None

    def __init__(self, path: Path, *, searched: bool, hashed: bool) -> None:
        try:
            with ByteSource(path) as source:
                self.sha256 = source.sha256() if hashed else None
                start = source.read(0, min(_E_TYPE + 2, source.size))
                self.is_library = start[:4] == ELF_MAGIC and start[_E_TYPE:] == _SHARED_OBJECT
                if self.is_library:
                    host = read_host_elf(source)
                    self.is_slimmed, self.soname = host.marker is not None, host.soname
                    self.has_gpu_code = has_gpu_code(source) if searched else None
                    self.note = read_note(source) if self.is_slimmed else None
        except FormatError as e:
            # None of these causes: it is damaged.
            if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, FileNotFoundError):
                self.is_library = _LIBRARY_NAME.search(path.name) is not None
                self.problem = e.problem


@dataclass
class Tree:
    """A folder, or single files of it, as it was found.

    Attributes:
        root: real path of the folder; names are below it.
        groups: its files, by name.
        sites: folders that distributions are installed in.
        leftovers: files with names of temporary ones, which killed runs left.
        partial: whether it is single files.
        searched: whether all facts tell of GPU code: a search reads much of some libraries.
        hashed: sizes in bytes of files whose facts have their digest.
    """

    root: Path
    groups: Sequence[FileGroup]
    sites: Sequence[Site]
    leftovers: Sequence[Path]
    partial: bool = False
    searched: bool = False
    hashed: Set[int] = frozenset()
    _digests: dict[FileGroup, str | None] = field(default_factory=dict)
    _facts: dict[FileGroup, Facts] = field(default_factory=dict)

    @functools.cached_property
    def _by_name(self) -> dict[str, FileGroup]:
        return {name: group for group in self.groups for name in group.names}

    def group_of(self, name: str) -> FileGroup | None:
        return self._by_name.get(name)

    def covers(self, names: Sequence[str]) -> bool:
        """Whether the tree tells if a file of these names is there."""
        return not self.partial or any(name in self._by_name for name in names)

    @functools.cached_property
    def _installers(self) -> dict[str, list[Installed]]:
        found: defaultdict[str, list[Installed]] = defaultdict(list)
        for one in (one for site in self.sites for one in site.installed):
            for path in one.libraries:
                found[path].append(one)
        return found

    def installers(self, name: str) -> Sequence[Installed]:
        """What installed a file: packages of conda before distributions in their environment."""
        return self._installers.get(os.path.join(self.root, name), ())

    def records(self, name: str) -> Records:
        """The digests that RECORD files have for a file."""
        path = os.path.join(self.root, name)
        found = ((one.libraries[path].digest, one.record) for one in self.installers(name))
        return {digest: record for digest, record in found if digest}

    def how_to_reinstall(self, *names: str) -> str:
        """Advice for getting back files that were not kept, by the commands that are known."""
        installers = (one for name in names for one in self.installers(name)[-1:])
        commands = dict.fromkeys(filter(None, (one.reinstall_command() for one in installers)))
        return "install it again" + (f": {'; '.join(commands)}" if commands else "")

    def digest(self, group: FileGroup) -> str | None:
        """SHA-256 of a file as it was found, in hex; None if it can't be read."""
        if group not in self._digests:
            is_hashed = group.size in self.hashed
            found = self.facts(group).sha256 if is_hashed else digest_of(self.root / group.name)
            self._digests[group] = found
        return self._digests[group]

    def digests(self, groups: Iterable[FileGroup], jobs: int) -> dict[FileGroup, str | None]:
        """The same for several files, of which so many are read at a time."""
        # hashlib lets other threads work meanwhile.
        pool = concurrent.futures.ThreadPoolExecutor(jobs)
        try:
            # The largest first, so that none is left to be hashed alone at the end.
            groups = sorted(groups, key=lambda group: -group.size)
            return dict(zip(groups, pool.map(self.digest, groups), strict=True))
        finally:
            # A user who interrupts should not wait for large files.
            pool.shutdown(wait=False, cancel_futures=True)

    def is_library(self, group: FileGroup) -> bool:
        """Whether it is a shared object, by name and by its first bytes; if unreadable, by name."""
        # There may be a hundred thousand other files.
        return ".so" in os.path.basename(group.name) and self.facts(group).is_library  # noqa: PTH119

    def facts(self, group: FileGroup) -> Facts:
        """The facts of a file as it was found."""
        if group not in self._facts:
            self._facts[group] = Facts(
                self.root / group.name,
                searched=self.searched,
                hashed=group.size in self.hashed,
            )
        return self._facts[group]

    def note(self, name: str) -> Note | None:
        """The note of a library with a spare, which may lie outside of the tree; None: none."""
        group = self.group_of(name)
        return read_fact(self.root / name, read_note) if group is None else self.facts(group).note

    def has_gpu_code(self, group: FileGroup) -> bool | None:
        """Whether a library has GPU code; None if it can't be read, or is damaged."""
        if self.searched:
            return self.facts(group).has_gpu_code
        return read_fact(self.root / group.name, has_gpu_code)


def soname_of(path: Path) -> str | None:
    """The soname of a library, if it has one and can be read."""
    return read_fact(path, lambda source: read_host_elf(source).soname)


# ---- The folders and files of a command ----


def refuse_other_files(paths: Sequence[Path]) -> None:
    """Refuse named files that can't be libraries, such as images.

    Raises:
        OptionError: one is. A damaged library, which the manifest beside it may name, is none.
    """
    for path in paths:
        head = read_fact(path, lambda source: source.read(0, min(len(ELF_MAGIC), source.size)))
        is_elf = head in (None, ELF_MAGIC)
        if not is_elf and not path.resolve().with_name(MANIFEST_NAME).exists():
            raise OptionError(f"{path}: {_NO_LIBRARY}")


def roots_of(paths: Sequence[Path]) -> list[Path]:
    """The roots of the trees that ``scan`` lists.

    Raises:
        OptionError: see ``scan``.
    """
    return [root for root, _ in _roots(paths)]


def scan(paths: Sequence[Path]) -> list[Tree]:
    """List the folders and files of these paths; files with their other names in their folder.

    Raises:
        OptionError: a path does not exist, or lies in another one.
        StoreError: one can't be listed.
    """
    return [scan_folder(root, wanted) for root, wanted in _roots(paths)]


def _roots(paths: Sequence[Path]) -> list[tuple[Path, set[tuple[int, int]] | None]]:
    """The folders, and those around files, each with what ``scan_folder`` wants there."""
    roots: dict[Path, set[tuple[int, int]] | None] = {}
    for path in paths:
        try:
            status, real = path.stat(), path.resolve()
        except (FileNotFoundError, NotADirectoryError):
            is_name = len(path.parts) == 1 and not path.suffix
            hint = "; slim takes paths, not names of distributions" if is_name else ""
            raise OptionError(f"{path}: no such file or folder{hint}") from None
        except OSError as e:
            raise OptionError(f"{path}: cannot be read: {e.strerror}") from e
        if stat.S_ISDIR(status.st_mode):
            roots[real] = None
        elif (wanted := roots.setdefault(real.parent, set())) is not None:
            wanted.add((status.st_dev, status.st_ino))
    # All of a folder is wanted.
    for inner in map(Path.resolve, paths):
        if outer := next((f for f in inner.parents if roots.get(f, ()) is None), None):
            raise OptionError(f"{inner} is in {outer}; give one of them")
    return sorted(roots.items())


def scan_folder(folder: Path, wanted: Set[tuple[int, int]] | None = None) -> Tree:
    """List all regular files below a folder, without following links to folders.

    Args:
        folder: the folder.
        wanted: device and inode of files; only these are listed, and not below the folder.

    Raises:
        StoreError: it can't be listed.
    """
    root = folder.resolve()
    found: dict[tuple[int, int], tuple[os.stat_result, list[str]]] = {}
    leftovers: list[Path] = []
    sites: set[Path] = set()
    metadata: dict[str, list[str]] = {}
    for name, status in _walk(root, metadata, deep=wanted is None):
        inode = status.st_dev, status.st_ino
        # A path for each of a hundred thousand files would take as long as listing them.
        hidden = name.startswith(".", name.rfind("/") + 1)
        if hidden and _TEMPORARY.fullmatch(name[name.rfind("/") + 1 :]):
            leftovers.append(root / name)
        # The manifest, which is JSON, can't have other names.
        elif (wanted is None or inode in wanted) and (name.isascii() or utf8(name) == name):
            found.setdefault(inode, (status, []))[1].append(name)
        if name.endswith(_METADATA_ENDS) and _METADATA.search(name) is not None:
            sites.add(root.joinpath(name).parents[1])
    above = find_site(root / MANIFEST_NAME, sites), find_prefix(root / MANIFEST_NAME)
    sites.update(filter(None, above))
    groups = (
        FileGroup(tuple(sorted(names)), FileState.of(status), status.st_nlink)
        for status, names in found.values()
    )
    return Tree(
        root,
        sorted(groups, key=attrgetter("names")),
        [Site(folder, metadata.get(str(folder))) for folder in sorted(sites)],
        leftovers,
        partial=wanted is not None,
    )


def _walk(
    root: Path, metadata: dict[str, list[str]], *, deep: bool
) -> Iterator[tuple[str, os.stat_result]]:
    """Names and status of regular files; ``metadata`` gets that of ``Site`` by folder."""
    start = len(os.path.join(root, ""))
    for folder, folders, files in os.walk(root, onerror=_refuse_unlisted):
        # A search by digest would find kept originals and slim them.
        if deep and ORIGINALS_MARK in files:
            folders.clear()
            continue
        metadata[folder] = [n for n in (*folders, *files) if n.endswith(METADATA_SUFFIXES)]
        # __pycache__ has half of the files and no libraries.
        folders[:] = [name for name in folders if deep and name != "__pycache__"]
        for path in map(os.path.join(folder, "").__add__, files):
            try:
                status = os.lstat(path)
            except OSError as e:
                _refuse_unlisted(e)
                continue
            if stat.S_ISREG(status.st_mode):
                yield path[start:], status


def _refuse_unlisted(error: OSError) -> None:
    # Another process may remove files and folders meanwhile.
    if not isinstance(error, FileNotFoundError):
        raise StoreError(f"{error.filename}: cannot be listed: {error.strerror}")
