"""Tells which distribution brought a file, and the command that installs it again.

Sources: ``INSTALLER`` has the installer's name (PyPA, "Recording installed projects").
``direct_url.json`` has the address of a distribution that did not come from an index (PyPA, "Direct
URL data structure"). ``conda-meta`` lists the files of each package (conda's ``PrefixRecord``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_negativa.installed.sites import Installed, Site
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.slimming import Origin
from pytest_negativa.storage.system import read_regular

_CONDA_LISTS = "conda-meta"
_PIP = "pip install --force-reinstall --no-deps"
_COMMANDS = {
    "conda": "conda install --force-reinstall --no-deps",
    "uv": "uv pip install --reinstall --no-deps",
}


class CondaPackage(msgspec.Struct):
    """A file of ``conda-meta``; ``files`` are below the environment."""

    name: str
    version: str
    files: list[str]


class _DirectUrl(msgspec.Struct):
    url: str
    vcs_info: dict[str, str] | None = None


class Origins:
    """Finds the origin of files.

    Args:
        sites: where distributions are installed.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._by_path: dict[str, Origin] = {}
        for site in sites:
            for installed in site.installed():
                if installed.libraries:
                    origin = _of_distribution(installed)
                    self._by_path.update(dict.fromkeys(installed.libraries, origin))
        self._conda: dict[Path, dict[str, Origin]] = {}

    def of(self, path: Path) -> Origin | None:
        """The distribution that a file belongs to; ``path`` is absolute and normalized."""
        if (origin := self._by_path.get(str(path))) is not None:
            return origin
        for prefix in path.parents:
            if (prefix / _CONDA_LISTS).is_dir():
                if prefix not in self._conda:
                    self._conda[prefix] = dict(_read_conda(prefix))
                return self._conda[prefix].get(path.relative_to(prefix).as_posix())
        return None


def reinstall_command(origin: Origin) -> str:
    """The command that installs a distribution again, in its environment."""
    equals = "=" if origin.installer == "conda" else "=="
    text = f"{origin.name}{equals}{origin.version}"
    if origin.url is not None:
        text = f"{origin.name} @ {origin.url}"
    return f"{_COMMANDS.get(origin.installer, _PIP)} {shlex.quote(text)}"


def _of_distribution(installed: Installed) -> Origin:
    folder = installed.record.parent
    try:
        installer = read_regular(folder / "INSTALLER").decode(errors="replace").strip()
    except OSError:
        installer = ""
    return Origin(
        name=installed.name,
        version=installed.version,
        installer=installer,
        url=_url_of(folder / "direct_url.json"),
    )


def _url_of(path: Path) -> str | None:
    try:
        direct = msgspec.json.decode(read_regular(path), type=_DirectUrl)
    except (OSError, *UNDECODABLE):
        return None
    if direct.vcs_info is None:
        return direct.url
    return f"{direct.vcs_info.get('vcs')}+{direct.url}@{direct.vcs_info.get('commit_id')}"


def _read_conda(prefix: Path) -> Iterator[tuple[str, Origin]]:
    for path in sorted((prefix / _CONDA_LISTS).glob("*.json")):
        try:
            package = msgspec.json.decode(read_regular(path), type=CondaPackage)
        except (OSError, *UNDECODABLE):
            continue
        origin = Origin(name=package.name, version=package.version, installer="conda")
        yield from ((file, origin) for file in package.files)
