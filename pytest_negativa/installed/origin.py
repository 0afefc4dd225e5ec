"""The command that installs the distribution of a file again.

A distribution with a ``direct_url.json`` came from no index (PyPA, "Direct URL data structure").
``INSTALLER`` has the installer's name (PyPA, "Recording installed projects").
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.installed.sites import Installed, Site
from pytest_negativa.storage.system import read_regular


class ReinstallCommands:
    """Finds the commands for files.

    Args:
        sites: where distributions are installed; an environment of conda before those in it.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._by_path: dict[str, str | None] = {}
        for site in sites:
            for one in site.installed:
                self._by_path |= dict.fromkeys(one.libraries, _command(one))

    def of(self, path: Path) -> str | None:
        """The command for a file, if one is known; ``path`` is absolute and normalized."""
        return self._by_path.get(str(path))


def _command(installed: Installed) -> str | None:
    if installed.is_conda:
        wanted = shlex.quote(f"{installed.name}={installed.version}")
        return f"conda install --force-reinstall --no-deps {wanted}"
    # An index may have another distribution of that name.
    if (installed.record.parent / "direct_url.json").exists():
        return None
    wanted = shlex.quote(f"{installed.name}=={installed.version}")
    # An environment that uv made has no pip.
    with contextlib.suppress(OSError):
        if read_regular(installed.record.parent / "INSTALLER").strip() == b"uv":
            return f"uv pip install --reinstall --no-deps {wanted}"
    return f"pip install --force-reinstall --no-deps {wanted}"
