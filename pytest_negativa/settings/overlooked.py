"""What a user set that has no effect: variables of no option, and tables that are not read.

Every pytest session asks, so the module imports little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_negativa.errors import did_you_mean
from pytest_negativa.models.environment import OWN_VARIABLES
from pytest_negativa.settings.options import CONFIG_NAME, OPTIONS

_TABLE = re.compile(rb"^\[ *tool *\. *(negativa|pytest-negativa)\b", re.MULTILINE)


def find_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable ``NEGATIVA_*`` that no option has."""
    known = {option.variable for option in OPTIONS if option.variable is not None}
    for name in sorted(environ):
        if name.startswith("NEGATIVA_") and name not in known | OWN_VARIABLES:
            yield f"{name}: no option has this variable{did_you_mean(name, known)}"


def find_tables(folder: str | os.PathLike[str]) -> Iterator[str]:
    """A warning if ``pyproject.toml`` in the folder has a table of our name."""
    path = Path(folder, "pyproject.toml")
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return
    if (found := _TABLE.search(data)) is not None:
        line = data.count(b"\n", 0, found.start()) + 1
        table = f"[tool.{found[1].decode()}]"
        yield f"{path}:{line}: {table} is not read; write these settings into {CONFIG_NAME}"
