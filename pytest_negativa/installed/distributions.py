"""Installed distributions by Python's own search; those without a name; what they require."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import (
    DistributionFinder,
    MetadataPathFinder,
    PackageMetadata,
    PathDistribution,
)
from pathlib import Path

from pytest_negativa.settings.globs import normalized
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
    path = list(sys.path if folders is None else folders)
    where = DistributionFinder.Context(path=path, name=name)
    return (Distribution(one._path) for one in MetadataPathFinder.find_distributions(where))


def named_metadata(distribution: Distribution) -> PackageMetadata | None:
    """The metadata, if they have a name; an interrupted removal leaves a distribution without.

    A distribution parses them anew at each look.
    """
    with contextlib.suppress(UnicodeDecodeError):
        metadata = distribution.metadata
        return metadata if metadata and metadata["Name"] else None
    return None


def find_distribution(name: str) -> Distribution | None:
    """Find the distribution of a name among those of this interpreter."""
    return next(filter(named_metadata, find_distributions(name=name)), None)


def with_requirements(
    root: Distribution, find: Callable[[str], Distribution | None] = find_distribution
) -> Iterator[Distribution]:
    """Yield ``root`` and the installed distributions that it requires, directly or not.

    Extras count: torch 2.11 gets NVIDIA's libraries as extras of cuda-toolkit.

    Args:
        root: the distribution to begin with.
        find: finds a distribution by name; by default, among those of this interpreter.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    seen: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    waiting: list[tuple[Distribution, frozenset[str]]] = [(root, frozenset())]
    while waiting:
        distribution, extras = waiting.pop()
        name = normalized(distribution.metadata["Name"])
        if extras in seen[name]:
            continue
        if not seen[name]:
            yield distribution
        seen[name].add(extras)
        for text in distribution.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                # Old distributions have metadata that the rules of today forbid.
                continue
            is_required = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            )
            if is_required and (required := find(requirement.name)) is not None:
                waiting.append((required, frozenset(requirement.extras)))
