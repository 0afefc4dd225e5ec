"""The command that installs the distribution of a file again.

``conda-meta`` lists the files of each package (conda's ``PrefixRecord``). A distribution with a
``direct_url.json`` came from no index (PyPA, "Direct URL data structure"). ``INSTALLER`` has the
installer's name (PyPA, "Recording installed projects").
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_negativa.installed.sites import Installed, Site
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.storage.system import read_regular

_CONDA_LISTS = "conda-meta"


class CondaPackage(msgspec.Struct):
    """A file of ``conda-meta``; ``files`` are below the environment."""

    name: str
    version: str
    files: list[str]


class ReinstallCommands:
    """Finds the commands for files.

    Args:
        sites: where distributions are installed.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._by_path: dict[str, str | None] = {}
        for site in sites:
            for one in site.installed():
                self._by_path |= dict.fromkeys(one.libraries, _command(one))
        self._conda: dict[Path, dict[str, str]] = {}

    def of(self, path: Path) -> str | None:
        """The command for a file, if one is known; ``path`` is absolute and normalized."""
        if str(path) in self._by_path:
            return self._by_path[str(path)]
        for prefix in path.parents:
            if (prefix / _CONDA_LISTS).is_dir():
                if prefix not in self._conda:
                    self._conda[prefix] = dict(_read_conda(prefix))
                return self._conda[prefix].get(path.relative_to(prefix).as_posix())
        return None


def _command(installed: Installed) -> str | None:
    # An index may have another distribution of that name.
    if (installed.record.parent / "direct_url.json").exists():
        return None
    wanted = shlex.quote(f"{installed.name}=={installed.version}")
    # An environment that uv made has no pip.
    with contextlib.suppress(OSError):
        if read_regular(installed.record.parent / "INSTALLER").strip() == b"uv":
            return f"uv pip install --reinstall --no-deps {wanted}"
    return f"pip install --force-reinstall --no-deps {wanted}"


def _read_conda(prefix: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((prefix / _CONDA_LISTS).glob("*.json")):
        try:
            package = msgspec.json.decode(read_regular(path), type=CondaPackage)
        except (OSError, *UNDECODABLE):
            continue
        wanted = shlex.quote(f"{package.name}={package.version}")
        command = f"conda install --force-reinstall --no-deps {wanted}"
        yield from ((file, command) for file in package.files)
