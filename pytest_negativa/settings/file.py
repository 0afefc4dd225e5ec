"""``negativa.yaml``: found, loaded and, with flags and environment, made into ``Settings``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_negativa.errors import OptionError
from pytest_negativa.models.settings import Config, Settings, nested
from pytest_negativa.settings.kinds import anchor
from pytest_negativa.settings.options import CONFIG_NAME, resolve, value_before_file
from pytest_negativa.settings.yaml_reader import Written, read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """What one file sets.

    Attributes:
        path: absolute.
        was_searched: found from the root folder upwards, not named by anybody.
        written: what it sets, by the option's name.
    """

    path: str
    was_searched: bool
    written: Mapping[str, Written]

    @property
    def config(self) -> Config:
        """The file as a record, with defaults where it says nothing; paths as written."""
        values = {name: written.value for name, written in self.written.items()}
        return msgspec.convert(nested(values), Config)


def find_config(start: str | os.PathLike[str]) -> str | None:
    """The nearest ``negativa.yaml`` in ``start`` or above, inside of the same repository.

    The folder that holds ``.git`` is the last one looked at: what lies above belongs to
    somebody else.

    Raises:
        OptionError: a file is there under a name that is nearly right.
    """
    nearest = Path(anchor(start, Path.cwd()))
    for folder in (nearest, *nearest.parents):
        if (path := folder / CONFIG_NAME).is_file():
            return str(path)
        if (path := folder / "negativa.yml").is_file():
            raise OptionError(f"{path}: rename it to {CONFIG_NAME}, the name that is looked for")
        if (folder / ".git").exists():
            break
    return None


def load_config(path: str | os.PathLike[str], *, was_searched: bool = False) -> ConfigFile:
    """Read and check a file.

    Raises:
        OptionError: it can't be read or has faults; the message lists each with its place.
    """
    absolute = anchor(path, Path.cwd())
    return ConfigFile(path=absolute, was_searched=was_searched, written=read_yaml(absolute))


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    root: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    of_command: bool = False,
) -> Settings:
    """Find the file, if there is one, and resolve all options.

    Args:
        flags: the given ones by option name, see ``options.pick_flags``.
        environ: ``os.environ`` or what stands for it.
        root: pytest's rootdir; the ``negativa`` command passes the current folder.
        cwd: where relative paths of flags and variables start; None: the current folder.
        of_command: the flags are those of the ``negativa`` command, and named so.

    Raises:
        OptionError: some source has a value that can't be used.
    """
    if (named := value_before_file("config", flags, environ)) is not None:
        config: ConfigFile | None = load_config(anchor(named, cwd or Path.cwd()))
    else:
        found = find_config(root)
        config = load_config(found, was_searched=True) if found else None
    return resolve(flags, environ, config, root=root, cwd=cwd, of_command=of_command)
