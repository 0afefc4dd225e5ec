"""Finds installed distributions by Python's own search, whatever else the process imported."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import PackageMetadata, PathDistribution

_MAX_METADATA = 64 << 20


def find_distributions(
    folders: Iterable[str] | None = None, *, name: str | None = None
) -> Iterator[PathDistribution]:
    """Yield installed distributions; the metadata of some may be missing.

    ``importlib.metadata.distributions`` would not do. Where the backport ``importlib_metadata`` is
    imported, that gives distributions of another class, with other errors.

    Args:
        folders: where to look; by default ``sys.path``.
        name: yields those of this name alone.
    """
    # Imported late: it takes 20 ms.
    from importlib.metadata import DistributionFinder, MetadataPathFinder

    path = list(sys.path if folders is None else folders)
    return iter(
        MetadataPathFinder.find_distributions(DistributionFinder.Context(path=path, name=name))
    )


def has_name(distribution: PathDistribution) -> bool:
    """Whether its metadata have a name; an interrupted removal leaves a distribution without."""
    return named_metadata(distribution) is not None


def named_metadata(distribution: PathDistribution) -> PackageMetadata | None:
    """The metadata, if they have a name. A distribution parses them anew at each look.

    Python would wait for a pipe in their place, and read a file of any size.
    """
    # No public attribute has the folder. It is a file for the oldest form of metadata.
    folder = str(distribution._path)
    for path in (folder, f"{folder}/METADATA", f"{folder}/PKG-INFO"):
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116 (a session looks at thousands)
            is_file = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_METADATA
            if not (is_file or stat.S_ISDIR(status.st_mode)):
                return None
    with contextlib.suppress(UnicodeDecodeError):
        metadata = distribution.metadata
        return metadata if metadata and metadata["Name"] else None
    return None


def normalized(name: str) -> str:
    """A name of a distribution as PyPA normalizes it."""
    # Imported late: it takes 25 ms, and installed files have no need of it.
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def find_distribution(name: str) -> PathDistribution | None:
    """Find the distribution of a name among those of this interpreter."""
    return next(filter(has_name, find_distributions(name=name)), None)
