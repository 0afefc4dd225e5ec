"""Manifest of a folder that was published at a URL: a run, or a spare."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.lock import Sha256


class PublishedFile(Record, frozen=True, kw_only=True):
    """A file of a published folder.

    Attributes:
        path: below the folder, with ``/``.
        size: bytes.
        sha256: of its content, which is also the name of its blob.
    """

    path: str
    size: NonNegative
    sha256: Sha256


class Published(Versioned, Record, frozen=True, kw_only=True):
    """``manifest.json`` of a published folder.

    Attributes:
        name: of the folder, such as the id of the run.
        files: by path.
    """

    name: str
    files: tuple[PublishedFile, ...]
