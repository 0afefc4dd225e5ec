"""Folders with installed distributions, which of these a file belongs to, and a project's own.

The distributions may be installed for another interpreter than the one that runs. One with a
``direct_url.json`` came from no index (PyPA, "Direct URL data structure"). ``INSTALLER`` has the
installer's name (PyPA, "Recording installed projects").
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from msgspec.structs import replace

from pytest_negativa.installed.distributions import (
    Distribution,
    find_distributions,
    has_name,
    named_metadata,
    with_requirements,
)
from pytest_negativa.installed.record import (
    CONDA_META,
    RECORD,
    RecordLine,
    is_code,
    iter_rows,
    path_of,
    read_conda,
    read_rows,
    update_entries,
    update_record,
    update_rows,
)
from pytest_negativa.models.code_files import map_files, name_of_files
from pytest_negativa.models.file_kinds import CODE_SUFFIXES
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.lock import Place
from pytest_negativa.settings.globs import normalized
from pytest_negativa.storage.system import read_regular

SITE_NAMES = ("site-packages", "dist-packages")
"""Folders that distributions are installed in."""
_METADATA_SUFFIX = ".dist-info"
METADATA_SUFFIXES = (_METADATA_SUFFIX, ".egg-info")
"""End the names of the metadata of distributions."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution in a site, or a package of a conda environment.

    Attributes:
        record: path of its RECORD, which may be absent, or of its file in ``conda-meta``.
        libraries: what that says of each library, and of each file that is GPU code by its name; by
            normalized absolute path. ``conda-meta`` lists RECORD files, too.
    """

    name: str
    version: str
    record: Path
    libraries: Mapping[str, RecordLine]

    @property
    def is_conda(self) -> bool:
        return self.record.parent.name == CONDA_META

    def update(self, changes: Mapping[str, RecordLine], hidden: Path | None = None) -> bool:
        """Change what its record says of files, see ``update_record``."""
        folder = self.record.parents[1]
        update = update_entries if self.is_conda else update_rows
        return update_record(self.record, lambda text: update(text, folder, changes), hidden)

    def reinstall_command(self) -> str | None:
        """The command that installs it again, if one is known."""
        if self.is_conda:
            wanted = shlex.quote(f"{self.name}={self.version}")
            return f"conda install --force-reinstall --no-deps {wanted}"
        # An index may have another distribution of that name.
        if (self.record.parent / "direct_url.json").exists():
            return None
        wanted = shlex.quote(f"{self.name}=={self.version}")
        # An environment that uv made has no pip.
        with contextlib.suppress(OSError):
            if read_regular(self.record.parent / "INSTALLER").strip() == b"uv":
                return f"uv pip install --reinstall --no-deps {wanted}"
        return f"pip install --force-reinstall --no-deps {wanted}"


@dataclass
class Site:
    """A folder such as ``site-packages``, or a conda environment, with what is installed in it.

    Attributes:
        folder: its real path.
        metadata: the names there that end as ``METADATA_SUFFIXES``, if the folder was listed.
    """

    folder: Path
    metadata: Collection[str] | None = None

    @functools.cached_property
    def installed(self) -> tuple[Installed, ...]:
        """The distributions and packages, by name; one with damaged metadata is left out."""
        found = filter(None, map(self._installed, self._distributions()))
        packages = (
            Installed(one.name, one.version, path, one.lines(self.folder))
            for path, one in read_conda(self.folder)
        )
        return tuple(sorted((*found, *packages), key=lambda one: one.name))

    def with_requirements(self, names: Collection[str]) -> Iterator[Installed]:
        """Yield the distributions of these names and those that they require, if they are here."""
        wanted = {normalized(name) for name in names}
        here = filter(has_name, self._distributions())
        found = {normalized(one.metadata["Name"]): one for one in here}
        closure = {
            normalized(d.metadata["Name"])
            for name in wanted & found.keys()
            for d in with_requirements(found[name], lambda name: found.get(normalized(name)))
        }
        return (one for one in self.installed if normalized(one.name) in closure)

    def _distributions(self) -> Iterator[Distribution]:
        if self.metadata is None:
            return find_distributions([str(self.folder)])
        return (Distribution(self.folder / name) for name in self.metadata)

    def _installed(self, distribution: Distribution) -> Installed | None:
        # No public attribute has the folder of the metadata.
        folder = Path(str(distribution._path))
        if folder.suffix != _METADATA_SUFFIX or (metadata := named_metadata(distribution)) is None:
            return None
        record = folder / RECORD
        return Installed(
            name=str(metadata["Name"]),
            version=metadata["Version"],
            record=record,
            libraries={
                path_of(row, folder.parent): RecordLine(*(*row[1:3], "", "")[:2])
                for row in read_rows(record)
                if row and is_code(row[0])
            },
        )


class Places:
    """Finds the distribution that a file belongs to."""

    def __init__(self) -> None:
        self._owners: dict[Path, dict[str, Installed]] = {}

    def of(self, path: str) -> Place:
        """Site and distribution of a real path.

        A wheel may install libraries outside of its site, such as ``lib`` of a virtual
        environment. Such a file is looked up in the sites of this interpreter, too.
        """
        site = find_site(Path(path))
        below = path if site is None else Path(path).relative_to(site).as_posix()
        sites = [] if site is None else [site]
        if site is None or site.name not in SITE_NAMES:
            sites += (Path(os.path.realpath(p)) for p in sys.path)
        for folder in sites:
            if (owner := self._owners_in(folder).get(path)) is not None:
                return Place(below, owner.name, owner.version)
        return Place(below)

    def from_folder(self, path: str, folder: Path) -> Place:
        """The same; a library of no site that lies below a folder has its path from there."""
        place, root = self.of(path), Path(os.path.realpath(folder))
        if not Path(place.path).is_relative_to(root):
            return place
        return replace(place, path=Path(place.path).relative_to(root).as_posix())

    def _owners_in(self, site: Path) -> dict[str, Installed]:
        if site not in self._owners:
            installed = Site(site).installed if site.is_dir() else ()
            self._owners[site] = {path: one for one in installed for path in one.libraries}
            self._owners[site] |= {str(site / name_of_files(one.name)): one for one in installed}
        return self._owners[site]


def is_installed(path: str) -> bool:
    """Whether a file's path lies among installed distributions."""
    return not set(SITE_NAMES).isdisjoint(Path(path).parts)


def find_site(path: Path, known: Collection[Path] = ()) -> Path | None:
    """The folder of installed distributions that a path lies below; None if there is none.

    ``known`` has such folders.
    """
    named = (folder for folder in path.parents if folder.name in SITE_NAMES)
    records = f"*{_METADATA_SUFFIX}/{RECORD}"
    others = (folder for folder in path.parents if folder in known or any(folder.glob(records)))
    return next(itertools.chain(named, others), None) or find_prefix(path)


def find_prefix(path: Path) -> Path | None:
    """The conda environment that a path lies below; None if there is none."""
    return next((folder for folder in path.parents if (folder / CONDA_META).is_dir()), None)


# ---- A project's own libraries ----

_DIRECT_URL = "direct_url.json"


class OwnLibraries:
    """Tells the project's own libraries from installed ones.

    Args:
        roots: folders of the project.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        self._places = Places()
        self._names: set[str] = set()
        self._folders = [Path(os.path.realpath(root)) for root in roots if root]
        for distribution in find_distributions():
            folder = _editable_folder(distribution)
            if folder is not None and has_name(distribution):
                self._folders.append(folder)
                self._names.add(normalized(distribution.metadata["Name"]))

    def __contains__(self, path: str) -> bool:
        """Whether the library of a real path is the project's own."""
        # A virtual environment often lies in the project's folder.
        if find_site(Path(path)) is None:
            return any(Path(path).is_relative_to(folder) for folder in self._folders)
        name = self._places.of(path).distribution if self._names else None
        return name is not None and normalized(name) in self._names


def _editable_folder(distribution: importlib.metadata.Distribution) -> Path | None:
    """The project's folder of an editable install; None for any other.

    Source: "Recording the Direct URL Origin of installed distributions" of packaging.python.org.
    """
    text = distribution.read_text(_DIRECT_URL)
    if text is None:
        return None
    try:
        origin = json.loads(text)
        is_editable = origin["dir_info"]["editable"] is True
        return (
            Path(os.path.realpath(unquote(urlparse(origin["url"]).path))) if is_editable else None
        )
    except (KeyError, TypeError, ValueError):
        return None


# ---- Files that are GPU code by their names ----

_MARKS = tuple(suffix.encode() for suffix in CODE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class CodeDistribution:
    """A distribution that has such files.

    Attributes:
        site: real path of the folder that it is installed in.
        rows: what RECORD says of each file, by path below the site.
    """

    name: str
    version: str
    site: Path
    rows: Mapping[str, RecordLine]

    @property
    def digest(self) -> str:
        """SHA-256 of the rows, which two installations of the same wheel share."""
        return digest_of_rows(self.rows)

    def map(self) -> LibraryMap:
        """The files as one library."""
        sizes = {name: int(row.size) for name, row in self.rows.items()}
        return map_files(str(self.site), self.name, self.digest, sizes)


def digest_of_rows(rows: Mapping[str, RecordLine]) -> str:
    """SHA-256 of what RECORD says of the files."""
    digest = hashlib.sha256()
    for path, (hashed, size) in sorted(rows.items()):
        digest.update(f"{path}\0{hashed}\0{size}\n".encode())
    return digest.hexdigest()


def find_code_distributions(folders: Iterable[str]) -> Iterator[CodeDistribution]:
    """Yield the distributions in some folders, such as ``sys.path``, that have such files."""
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders if folder):
        for record in sorted(Path(folder).glob(f"*.dist-info/{RECORD}")):
            with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error):
                data = read_regular(record)
                # Most distributions have none, and reading CSV takes most of the time.
                has_any = any(mark in data for mark in _MARKS)
                rows = dict(code_rows(data.decode("utf-8"))) if has_any else {}
                metadata = named_metadata(Distribution(record.parent)) if rows else None
                if metadata is not None and (version := metadata["Version"]) is not None:
                    yield CodeDistribution(str(metadata["Name"]), version, Path(folder), rows)


def code_rows(text: str) -> Iterator[tuple[str, RecordLine]]:
    """The rows of a RECORD that are about such files, by path below the site.

    Raises:
        csv.Error: it is not CSV.
    """
    for _, row in iter_rows(text):
        if (
            len(row) >= 3
            and row[0].endswith(CODE_SUFFIXES)
            and row[1]
            and row[2].isdecimal()
            and int(row[2])
        ):
            path = os.path.normpath(row[0])
            if not path.startswith("..") and not os.path.isabs(path):  # noqa: PTH117
                yield path, RecordLine(row[1], row[2])
