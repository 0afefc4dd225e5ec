"""Which libraries the run of a lock loaded, and which it is known not to have loaded."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import FormatError, OptionError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.distributions import normalized
from pytest_negativa.installed.sites import Installed
from pytest_negativa.models.lock import LeftOut, Lock, LockedLibrary
from pytest_negativa.models.settings import Libraries
from pytest_negativa.settings.globs import LibraryNames, is_selected

_OWN_DISTRIBUTION = "pytest_negativa"
_INTERPRETER = "libpython"
# Of glibc, musl and their loaders.
_LIBC = ("ld-linux", "ld-musl", "ld-2.", "libc.so", "libc-2.", "libc.musl")


class Role(enum.Enum):
    """What the run of a lock had to do with a library."""

    LOADED = "loaded, or may stand for one that was"
    NEVER = "never loaded"
    KEPT = "never loaded, and the project keeps it"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a lock tells about loading.

    Attributes:
        versions: of the lock's distributions, by normalized name.
        names: base names and sonames of all libraries with GPU code that the run loaded.
        left_out: paths, as in the lock, of libraries that it loaded and that must stay whole.
        selected: which libraries the project allows to change.
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
                versions[normalized(row.distribution)].add(row.version)
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

        Other versions may load more libraries, also of the distributions that they require.
        """
        return all(
            one.version in self.versions.get(normalized(one.name), (one.version,)) for one in found
        )

    def role_of(self, distribution: str | None, path: Path, names: Iterable[str]) -> Role:
        """What the run had to do with a library.

        A library in any folder may be loaded in place of one that the run loaded, if they share the
        base name or the soname.

        Args:
            distribution: name of the one that installed it, if one did.
            path: of the library.
            names: all its names, below some folder.
        """
        soname = soname_of(path)
        if not self.names.isdisjoint((*(name.rpartition("/")[2] for name in names), soname)):
            return Role.LOADED
        library = LibraryNames(str(path), soname, distribution)
        return Role.NEVER if is_selected(self.selected, library) else Role.KEPT

    def is_left_out(self, path: Path) -> bool:
        """Whether a file lies where the run loaded a library that must stay whole."""
        return any(path.as_posix().endswith(f"/{left}") for left in self.left_out) or (
            path.as_posix() in self.left_out
        )


def runs_below(path: Path, names: Iterable[str]) -> str | None:
    """Why a library must stay whole even if no test loaded it; None if it may lose code.

    Args:
        path: of the library.
        names: all its names, below some folder.
    """
    if _OWN_DISTRIBUTION in path.parts:
        return "it is a part of pytest-negativa"
    for name in (*(name.rpartition("/")[2] for name in names), soname_of(path) or ""):
        if name.startswith(_LIBC):
            return "it is a part of the C library"
        if name.startswith(_INTERPRETER):
            return "it is an interpreter of Python"
    return None


def soname_of(path: Path) -> str | None:
    """The soname of a library, if it has one and can be read."""
    try:
        with ByteSource(path) as source:
            return read_host_elf(source).soname
    except FormatError:
        return None


def require_known(lock: Lock) -> None:
    """Refuse a lock that doesn't prove what was loaded.

    Raises:
        OptionError: the lock is not proved, has no libraries, or its run may have loaded more.
    """
    proof = lock.proof
    if not proof.proved:
        raise OptionError("--drop-never-loaded goes with a proved lock; this one is not proved")
    if proof.incomplete:
        raise OptionError(
            "--drop-never-loaded: the run of the lock may have loaded more libraries: "
            f"{'; '.join(proof.incomplete)}"
        )
    if not lock.libraries:
        raise OptionError("--drop-never-loaded: the lock has no libraries, so it proves nothing")
