"""Which libraries the run of a lock loaded, and which it is known not to have loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_negativa.errors import OptionError
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary
from pytest_negativa.slimming.sites import Installed


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a lock tells of loading.

    Attributes:
        versions: of the lock's distributions, by normalized name.
        names: base names and sonames of all that the run loaded and that has GPU code.
        left_out: paths, as the lock has them, of what it loaded and what is not to be changed.
    """

    versions: Mapping[str, frozenset[str | None]]
    names: frozenset[str]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, lock: Lock) -> Loaded:
        rows: tuple[LockedLibrary | LeftOut, ...] = (*lock.libraries, *lock.left_out)
        versions: defaultdict[str, set[str | None]] = defaultdict(set)
        for row in rows:
            if row.distribution is not None:
                versions[canonicalize_name(row.distribution)].add(row.version)
        names = {row.path.rpartition("/")[2] for row in rows}
        names |= {library.soname for library in lock.libraries if library.soname is not None}
        return cls(
            versions={name: frozenset(found) for name, found in versions.items()},
            names=frozenset(names),
            left_out=tuple(row.path for row in lock.left_out),
        )

    def is_never(self, installed: Installed, names: Iterable[str]) -> bool:
        """Whether the run never loaded a library of these names, of an installed distribution.

        Nothing is known of another version than the run's. And a library of a name that it did
        load may be the one that is loaded here, wherever it lies.
        """
        versions = self.versions.get(canonicalize_name(installed.name))
        if versions is not None and installed.version not in versions:
            return False
        return not any(name.rpartition("/")[2] in self.names for name in names)

    def is_left_out(self, path: Path) -> bool:
        """Whether a file lies where the run loaded a library that is not to be changed."""
        return any(path.as_posix().endswith(f"/{left}") for left in self.left_out) or (
            path.as_posix() in self.left_out
        )


def require_known(lock: Lock) -> None:
    """Refuse a lock that doesn't tell for sure what was loaded.

    Raises:
        OptionError: it doesn't.
    """
    proof = lock.proof
    if not proof.proved:
        raise OptionError("--drop-never-loaded: goes with a lock that is proved; this one is not")
    if proof.incomplete:
        raise OptionError(
            "--drop-never-loaded: the run of the lock may have loaded more than is known: "
            f"{'; '.join(proof.incomplete)}"
        )
    if not lock.libraries:
        raise OptionError("--drop-never-loaded: the lock has no libraries, so nothing is proved")
