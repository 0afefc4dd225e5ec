"""Libraries that a project builds itself: in its folder or of an editable install."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlparse

from pytest_negativa.installed.distributions import find_distributions, has_name, normalized
from pytest_negativa.installed.sites import Places, find_site

_DIRECT_URL = "direct_url.json"


class OwnLibraries:
    """Tells the project's own libraries from installed ones.

    Args:
        roots: folders of the project.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        self._places = Places()
        self._names: set[str] = set()
        self._folders = [Path(os.path.realpath(root)) for root in roots if root]
        for distribution in find_distributions():
            folder = _editable_folder(distribution)
            if folder is not None and has_name(distribution):
                self._folders.append(folder)
                self._names.add(normalized(distribution.metadata["Name"]))

    def __contains__(self, path: str) -> bool:
        """Whether the library of a real path is the project's own."""
        # A virtual environment often lies in the project's folder.
        if find_site(Path(path)) is None:
            return any(Path(path).is_relative_to(folder) for folder in self._folders)
        name = self._places.of(path).distribution if self._names else None
        return name is not None and normalized(name) in self._names


def _editable_folder(distribution: importlib.metadata.Distribution) -> Path | None:
    """The project's folder of an editable install; None for any other.

    Source: "Recording the Direct URL Origin of installed distributions" of packaging.python.org.
    """
    text = distribution.read_text(_DIRECT_URL)
    if text is None:
        return None
    try:
        origin = json.loads(text)
        is_editable = origin["dir_info"]["editable"] is True
        return (
            Path(os.path.realpath(unquote(urlparse(origin["url"]).path))) if is_editable else None
        )
    except (KeyError, TypeError, ValueError):
        return None
