"""The active environment if a user names none: VIRTUAL_ENV, CONDA_PREFIX, ``.venv``."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import OptionError

# What uv tool and pipx leave in an environment that they make for one command.
_OF_A_TOOL = ("uv-receipt.toml", "pipx_metadata.json")


def find_active(
    environ: Mapping[str, str], here: Path, *, or_own: bool
) -> tuple[tuple[Path, ...], str]:
    """The folder of VIRTUAL_ENV, CONDA_PREFIX or ``.venv``, and which of them it is.

    Args:
        environ: the environment variables.
        here: the folder that may have a ``.venv``.
        or_own: without any of them, take the packages of the interpreter that runs.

    Raises:
        OptionError: there is none, or that of the interpreter has negativa alone.
    """
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := environ.get(name):
            return (Path(folder),), name
    if (local := here / ".venv").is_dir():
        return (local,), local.name
    if not or_own:
        raise OptionError(
            "no PATH, and no active environment (VIRTUAL_ENV, CONDA_PREFIX or .venv): name the "
            "folder to change, such as a site-packages folder"
        )
    if any(Path(sys.prefix, name).exists() for name in _OF_A_TOOL):
        raise OptionError(
            f"no PATH, and no active environment; {sys.prefix} has negativa alone, as uv tool or "
            "pipx installed it: name a PATH, or activate the environment of the program"
        )
    own = dict.fromkeys(Path(sysconfig.get_path(n)).resolve() for n in ("purelib", "platlib"))
    return tuple(filter(Path.is_dir, own)), "the Python that runs negativa"
