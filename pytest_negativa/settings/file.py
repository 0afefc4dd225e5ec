"""Finds and loads ``negativa.yaml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_negativa.errors import OptionError
from pytest_negativa.models.settings import Config, nested
from pytest_negativa.settings.options import CONFIG_NAME
from pytest_negativa.settings.value_types import anchor
from pytest_negativa.settings.yaml_reader import FileValue, read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """What one file sets.

    Attributes:
        path: absolute.
        was_searched: found from the root folder upwards, not named by the user.
        written: what it sets, by the option's name.
    """

    path: str
    was_searched: bool
    written: Mapping[str, FileValue]

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
