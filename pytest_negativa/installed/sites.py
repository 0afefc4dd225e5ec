"""Sites (site-packages, conda): what is installed there, files of GPU code, reinstall advice.

The distributions may be installed for another interpreter than the one that runs. One with a
``direct_url.json`` came from no index (PyPA, "Direct URL data structure"). ``INSTALLER`` has the
installer's name (PyPA, "Recording installed projects").
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.installed.conda import CONDA_META, read_conda, update_entries
from pytest_negativa.installed.distributions import (
    Distribution,
    find_distributions,
    named_metadata,
    with_requirements,
)
from pytest_negativa.installed.record import (
    RECORD,
    RecordLine,
    code_files,
    code_lines,
    digest_of_lines,
    update_record,
    update_rows,
)
from pytest_negativa.models.code_files import map_files
from pytest_negativa.models.file_kinds import CODE_SUFFIXES
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.settings.globs import normalized
from pytest_negativa.storage.system import read_regular

SITE_NAMES = ("site-packages", "dist-packages")
"""Folders that distributions are installed in."""
_METADATA_SUFFIX = ".dist-info"
METADATA_SUFFIXES = (_METADATA_SUFFIX, ".egg-info")
"""End the names of the metadata of distributions."""
DIRECT_URL = "direct_url.json"


@dataclass(frozen=True)
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
    def site(self) -> Path:
        """The folder that it is installed in."""
        return self.record.parents[1]

    @property
    def is_conda(self) -> bool:
        return self.record.parent.name == CONDA_META

    @functools.cached_property
    def code_files(self) -> Mapping[str, RecordLine]:
        """Rows of RECORD for files whose names are those of GPU code, by path below the site.

        All of them together are one library, see ``models.code_files``.
        """
        lines = {} if self.is_conda else self.libraries
        return code_files({os.path.relpath(path, self.site): x for path, x in lines.items()})

    @property
    def code_digest(self) -> str:
        """The digest of these files."""
        return digest_of_lines(self.code_files)

    def map_code_files(self) -> LibraryMap:
        """These files as one library."""
        sizes = {name: int(line.size) for name, line in self.code_files.items()}
        return map_files(str(self.site), self.name, self.code_digest, sizes)

    def update(self, changes: Mapping[str, RecordLine], hidden: Path | None = None) -> None:
        """Change what its record says of files, see ``update_record``."""
        update = update_entries if self.is_conda else update_rows
        update_record(self.record, lambda text: update(text, self.site, changes), hidden)

    def reinstall_command(self) -> str | None:
        """The command that installs it again, if one is known."""
        if self.is_conda:
            wanted = shlex.quote(f"{self.name}={self.version}")
            return f"conda install --force-reinstall --no-deps {wanted}"
        # An index may have another distribution of that name.
        if (self.record.parent / DIRECT_URL).exists():
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
        found = filter(None, map(read_installed, self._distributions()))
        packages = (
            Installed(one.name, one.version, path, one.lines(self.folder))
            for path, one in read_conda(self.folder)
        )
        return tuple(sorted((*found, *packages), key=lambda one: one.name))

    def with_requirements(self, names: Collection[str]) -> Iterator[Installed]:
        """Yield the distributions of these names and those that they require, if they are here."""
        wanted = {normalized(name) for name in names}
        here = filter(named_metadata, self._distributions())
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


def read_installed(distribution: Distribution) -> Installed | None:
    """A distribution with what its RECORD says; None if its metadata are damaged, or of an egg."""
    # No public attribute has the folder of the metadata.
    folder = Path(str(distribution._path))
    if folder.suffix != _METADATA_SUFFIX or (metadata := named_metadata(distribution)) is None:
        return None
    record, lines = folder / RECORD, dict[str, RecordLine]()
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error):
        lines = code_lines(read_regular(record).decode("utf-8"))
    return Installed(
        name=str(metadata["Name"]),
        version=metadata["Version"],
        record=record,
        libraries={
            os.path.normpath(os.path.join(folder.parent, name)): line
            for name, line in lines.items()
        },
    )


def find_code_distributions(folders: Iterable[str]) -> Iterator[Installed]:
    """Yield the distributions in some folders, such as ``sys.path``, with files of GPU code."""
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders if folder):
        for record in sorted(Path(folder).glob(f"*{_METADATA_SUFFIX}/{RECORD}")):
            with contextlib.suppress(OSError):
                data = read_regular(record)
                # Most distributions have none, and reading CSV takes most of the time.
                has_any = any(suffix.encode() in data for suffix in CODE_SUFFIXES)
                found = read_installed(Distribution(record.parent)) if has_any else None
                if found is not None and found.version is not None and found.code_files:
                    yield found


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
