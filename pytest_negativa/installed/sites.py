"""Folders with installed distributions, and which of these a file belongs to.

The interpreter that the distributions are installed for need not be the one that runs.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_negativa.installed.csvrows import iter_rows
from pytest_negativa.installed.libraries import with_requirements
from pytest_negativa.planning.lock import Place

_SITE_NAMES = ("site-packages", "dist-packages")
_METADATA_SUFFIX = ".dist-info"
RECORD = "RECORD"


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution in a site; ``record`` is its RECORD, whether it is there or not.

    Attributes:
        files: real paths of its libraries, as far as RECORD names them.
    """

    name: str
    version: str
    record: Path
    files: frozenset[str]


@dataclass(slots=True)
class Site:
    """A folder such as ``site-packages``, with the distributions installed in it."""

    folder: Path
    _read: tuple[Installed, ...] | None = field(default=None)

    def installed(self) -> tuple[Installed, ...]:
        """What is installed, by name; damaged metadata is passed over."""
        if self._read is None:
            found = (self._installed(d) for d in self._distributions())
            self._read = tuple(sorted(filter(None, found), key=lambda one: one.name))
        return self._read

    def with_requirements(self, names: Collection[str]) -> Iterator[Installed]:
        """The distributions of these names and those that they require, as far as they are here."""
        wanted = {canonicalize_name(name) for name in names}
        found = {canonicalize_name(d.metadata["Name"]): d for d in self._distributions()}

        def find(name: str) -> importlib.metadata.Distribution:
            try:
                return found[canonicalize_name(name)]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        closure = {
            canonicalize_name(d.metadata["Name"])
            for name in wanted & found.keys()
            for d in with_requirements(found[name], find)
        }
        return (one for one in self.installed() if canonicalize_name(one.name) in closure)

    def _distributions(self) -> list[importlib.metadata.PathDistribution]:
        # What an interrupted removal leaves behind has no name.
        found = importlib.metadata.distributions(path=[str(self.folder)])
        return [
            d
            for d in found
            if isinstance(d, importlib.metadata.PathDistribution)
            and d.metadata
            and d.metadata["Name"]
        ]

    def _installed(self, distribution: importlib.metadata.PathDistribution) -> Installed | None:
        folder = Path(str(distribution.locate_file("")))
        # The folder of the metadata is known to no public name.
        metadata = Path(str(distribution._path))
        if metadata.suffix != _METADATA_SUFFIX:
            return None
        record = metadata / RECORD
        try:
            text = record.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        names = (row[0] for _, _, row in iter_rows(text) if row)
        files = frozenset(
            os.path.normpath(os.path.join(folder, name)) for name in names if ".so" in name
        )
        return Installed(
            name=str(distribution.metadata["Name"]),
            version=distribution.version,
            record=record,
            files=files,
        )


class Places:
    """Tells where real paths belong, see ``Place``."""

    def __init__(self) -> None:
        self._owners: dict[Path, dict[str, Installed]] = {}

    def of(self, path: str) -> Place:
        site = find_site(Path(path))
        if site is None:
            return Place(path)
        if site not in self._owners:
            installed = Site(site).installed() if site.is_dir() else ()
            self._owners[site] = {file: one for one in installed for file in one.files}
        owner = self._owners[site].get(path)
        below = Path(path).relative_to(site).as_posix()
        if owner is None:
            return Place(below)
        return Place(below, owner.name, owner.version)


def find_site(path: Path) -> Path | None:
    """The folder that distributions are installed in, of those that ``path`` lies below."""
    for folder in path.parents:
        if folder.name in _SITE_NAMES:
            return folder
    for folder in path.parents:
        if next(folder.glob(f"*{_METADATA_SUFFIX}/{RECORD}"), None) is not None:
            return folder
    return None
