"""The owner of a file: a distribution, or the project itself (editable installs too)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlparse

from msgspec.structs import replace

from pytest_negativa.installed.distributions import Distribution, find_distributions, named_metadata
from pytest_negativa.installed.sites import DIRECT_URL, SITE_NAMES, Installed, Site, find_site
from pytest_negativa.models.code_files import name_of_files
from pytest_negativa.models.lock import Place
from pytest_negativa.settings.globs import normalized


class Owners:
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


class OwnLibraries:
    """Tells the project's own libraries from installed ones.

    Args:
        roots: folders of the project.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        self._owners = Owners()
        self._names: set[str] = set()
        self._folders = [Path(os.path.realpath(root)) for root in roots if root]
        for distribution in find_distributions():
            folder = _editable_folder(distribution)
            if folder is not None and (metadata := named_metadata(distribution)):
                self._folders.append(folder)
                self._names.add(normalized(metadata["Name"]))

    def __contains__(self, path: str) -> bool:
        """Whether the library of a real path is the project's own."""
        # A virtual environment often lies in the project's folder.
        if find_site(Path(path)) is None:
            return any(Path(path).is_relative_to(folder) for folder in self._folders)
        name = self._owners.of(path).distribution if self._names else None
        return name is not None and normalized(name) in self._names


def _editable_folder(distribution: Distribution) -> Path | None:
    """The project's folder of an editable install; None for any other.

    Source: "Recording the Direct URL Origin of installed distributions" of packaging.python.org.
    """
    try:
        origin = json.loads(distribution.read_text(DIRECT_URL) or "")
        is_editable = origin["dir_info"]["editable"] is True
        return (
            Path(os.path.realpath(unquote(urlparse(origin["url"]).path))) if is_editable else None
        )
    except (KeyError, TypeError, ValueError):
        return None
