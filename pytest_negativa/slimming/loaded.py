"""Which libraries the run of a lock loaded, and which it is known not to have loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_negativa.errors import FormatError, OptionError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.sites import Installed
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary
from pytest_negativa.models.settings import Libraries
from pytest_negativa.settings.globs import LibraryNames, is_selected


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a lock tells of loading.

    Attributes:
        versions: of the lock's distributions, by normalized name.
        names: base names and sonames of all that the run loaded and that has GPU code.
        left_out: paths, as the lock has them, of what it loaded and what is not to be changed.
        selected: which libraries the project lets be changed.
    """

    versions: Mapping[str, frozenset[str | None]]
    names: frozenset[str]
    left_out: tuple[str, ...]
    selected: Libraries

    @classmethod
    def of(cls, lock: Lock) -> Loaded:
        rows: tuple[LockedLibrary | LeftOut, ...] = (*lock.libraries, *lock.left_out)
        versions: defaultdict[str, set[str | None]] = defaultdict(set)
        for row in rows:
            if row.distribution is not None:
                versions[canonicalize_name(row.distribution)].add(row.version)
        names = {row.path.rpartition("/")[2] for row in rows}
        names |= {row.soname for row in rows if row.soname is not None}
        return cls(
            versions={name: frozenset(found) for name, found in versions.items()},
            names=frozenset(names),
            left_out=tuple(row.path for row in lock.left_out),
            selected=Libraries(include=lock.include, exclude=lock.exclude),
        )

    def are_versions(self, found: Iterable[Installed]) -> bool:
        """Whether the lock's distributions are here in its versions.

        Others may load more, also of what they require.
        """
        return all(
            one.version in self.versions.get(canonicalize_name(one.name), (one.version,))
            for one in found
        )

    def is_never(self, installed: Installed, path: Path, names: Iterable[str]) -> bool:
        """Whether the run never loaded a library of these names, of an installed distribution.

        A library of a name that it did load, or of such a soname, may be the one that is loaded
        here, wherever it lies. What the project wants to keep stays in any case.
        """
        if any(name.rpartition("/")[2] in self.names for name in names):
            return False
        soname = soname_of(path)
        if soname in self.names:
            return False
        return is_selected(self.selected, LibraryNames(str(path), soname, installed.name))

    def is_left_out(self, path: Path) -> bool:
        """Whether a file lies where the run loaded a library that is not to be changed."""
        return any(path.as_posix().endswith(f"/{left}") for left in self.left_out) or (
            path.as_posix() in self.left_out
        )


def soname_of(path: Path) -> str | None:
    """The soname of a library, if it has one and can be read."""
    try:
        with ByteSource(path) as source:
            return read_host_elf(source).soname
    except FormatError:
        return None


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
