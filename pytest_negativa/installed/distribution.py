"""An installed distribution whose metadata are regular files.

In a module of its own, since ``importlib.metadata`` takes 20 ms to import.
"""

from __future__ import annotations

import os
from importlib.metadata import PathDistribution
from pathlib import Path

from pytest_negativa.storage.system import read_regular

_MAX_BYTES = 64 << 20


class Distribution(PathDistribution):
    """Python's own would wait for a pipe in place of a file, and read a file of any size."""

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """The text of one of its files; None if that can't be read.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        # No public attribute has the folder. For an egg it is a place in a ZIP archive.
        if not isinstance(path := self._path.joinpath(filename), Path):
            return super().read_text(filename)
        try:
            return read_regular(path, limit=_MAX_BYTES).decode("utf-8")
        except OSError:
            return None
