"""Finds installed distributions by Python's own search, whatever else the process imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import PackageMetadata

    from pytest_negativa.installed.distribution import Distribution


def find_distributions(
    folders: Iterable[str] | None = None, *, name: str | None = None
) -> Iterator[Distribution]:
    """Yield installed distributions; the metadata of some may be missing.

    ``importlib.metadata.distributions`` would not do. Where the backport ``importlib_metadata`` is
    imported, that gives distributions of another class, with other errors.

    Args:
        folders: where to look; by default ``sys.path``.
        name: yields those of this name alone.
    """
    # Imported late: it takes 20 ms.
    from importlib.metadata import DistributionFinder, MetadataPathFinder

    from pytest_negativa.installed.distribution import Distribution

    path = list(sys.path if folders is None else folders)
    found = MetadataPathFinder.find_distributions(DistributionFinder.Context(path=path, name=name))
    return (Distribution(one._path) for one in found)


def has_name(distribution: Distribution) -> bool:
    """Whether its metadata have a name; an interrupted removal leaves a distribution without."""
    return named_metadata(distribution) is not None


def named_metadata(distribution: Distribution) -> PackageMetadata | None:
    """The metadata, if they have a name. A distribution parses them anew at each look."""
    with contextlib.suppress(UnicodeDecodeError):
        metadata = distribution.metadata
        return metadata if metadata and metadata["Name"] else None
    return None


def normalized(name: str) -> str:
    """A name of a distribution as PyPA normalizes it."""
    # Imported late: it takes 25 ms, and installed files have no need of it.
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def find_distribution(name: str) -> Distribution | None:
    """Find the distribution of a name among those of this interpreter."""
    return next(filter(has_name, find_distributions(name=name)), None)
