"""Watches the files of distributions that are GPU code: which of them does a run open?"""

from __future__ import annotations

import os
from collections.abc import Iterable

from pytest_negativa.installed.sites import find_code_distributions
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.processes.open_watch import OpenWatch


class CodeFileWatch(OpenWatch):
    """Watches all files within a context; see ``OpenWatch``.

    Args:
        folders: where distributions are installed, such as ``sys.path``.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._found = tuple(find_code_distributions(folders))
        paths = [str(one.site / name) for one in self._found for name in one.rows]
        self._here = {path for path in paths if os.path.isfile(path)}  # noqa: PTH113
        super().__init__(self._here, finds_openers=False)

    def opened(self) -> tuple[WatchedFiles, ...]:
        """Files that were opened until now."""
        self.check()
        opens = self.opens
        found = []
        for one in self._found:
            paths = {str(one.site / name): name for name in one.rows}
            here = sorted(name for path, name in paths.items() if path in self._here)
            files = {name: (one.rows[name].digest, int(one.rows[name].size)) for name in here}
            unseen = [reason for path, reason in opens.unseen.items() if path in paths]
            if any(os.path.isfile(path) for path in paths.keys() - self._here):  # noqa: PTH113
                unseen.append("a file appeared meanwhile, and was not watched")
            found.append(
                WatchedFiles(
                    distribution=one.name,
                    version=one.version,
                    site=str(one.site),
                    digest=one.digest,
                    files=files,
                    opened=tuple(sorted(paths[path] for path in opens.times if path in paths)),
                    unseen=next(iter(unseen), None),
                )
            )
        return tuple(found)
