"""Globs on libraries (path, soname, ``dist:``), kernels, tests, ``command:``; path rules.

In every glob ``*`` stands for any characters, including ``/``, and ``?`` for one character.
Brackets stand for themselves, since signatures (``void f(float (&)[3])``) and parametrized tests
(``test_add[float-2]``) have many. Case matters.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from pytest_negativa.errors import OptionError, did_you_mean
from pytest_negativa.models.library import LibraryFile
from pytest_negativa.models.settings import Libraries, Limits, Settings

_T = TypeVar("_T")

DISTRIBUTION_PREFIX = "dist:"
_COMMAND_PREFIX = "command:"

LIMIT_OPTIONS = (
    "coverage.fail_under",
    "thresholds.max_unused_percent",
    "thresholds.min_used_kernels",
    "thresholds.max_gpu_code",
    "compare.fail",
)
"""Options that hold limits, also by glob on libraries."""
_LIBRARY_OPTIONS = (
    "libraries.include",
    "libraries.exclude",
    "keep.libraries",
    "coverage.libraries",
    *LIMIT_OPTIONS,
)


class LibraryNames(NamedTuple):
    """The names of a library; ``distribution`` is the package that installed it."""

    path: str
    soname: str | None = None
    distribution: str | None = None


def names_of(library: LibraryFile, distribution: str | None) -> LibraryNames:
    """The names of a file; ``distribution`` is the package that installed it."""
    return LibraryNames(library.path, library.soname, distribution)


def matches(glob: str, name: str) -> bool:
    """Whether ``glob`` matches the whole name of a kernel or a node id."""
    return fnmatch.fnmatchcase(name, glob.replace("[", "[[]"))


def matches_library(glob: str, library: LibraryNames) -> bool:
    """Whether ``glob`` matches the library.

    A glob with the prefix ``dist:`` is compared with the distribution's name, normalized as package
    indexes do (case, ``-``, ``_`` and ``.`` don't matter; PEP 503). A glob with a slash is compared
    with the real path, or with its end if the glob doesn't start with a slash. Any other glob is
    compared with the file's name and the soname.
    """
    if glob.startswith(DISTRIBUTION_PREFIX):
        wanted = normalized(glob[len(DISTRIBUTION_PREFIX) :].strip())
        return library.distribution is not None and matches(
            wanted, normalized(library.distribution)
        )
    if "/" in glob:
        return matches(glob, library.path) or matches(f"*/{glob}", library.path)
    names = (Path(library.path).name, library.soname)
    return any(name is not None and matches(glob, name) for name in names)


def first_glob(globs: Iterable[str], library: LibraryNames) -> str | None:
    """The first of the globs that matches a library; None if none does."""
    return next((glob for glob in globs if matches_library(glob, library)), None)


def matches_command(glob: str, command: str) -> bool:
    """Whether ``glob`` has the prefix ``command:`` and matches a process's whole command line."""
    return glob.startswith(_COMMAND_PREFIX) and matches(
        glob.removeprefix(_COMMAND_PREFIX).strip(), command
    )


def limit_of(limits: Mapping[str, _T], library: LibraryNames) -> _T | None:
    """The limit of the first glob that matches a library; None if none does."""
    glob = first_glob(limits, library)
    return None if glob is None else limits[glob]


def normalized(name: str) -> str:
    """The name of a distribution as package indexes have it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_selected(libraries: Libraries, library: LibraryNames) -> bool:
    """Whether the library is analysed: not excluded, and included if any library is."""
    is_included = not libraries.include or first_glob(libraries.include, library) is not None
    return is_included and first_glob(libraries.exclude, library) is None


class GlobSet:
    """Several globs on kernels or node ids, fast on many names; remembers which matched."""

    def __init__(self, globs: Iterable[str]) -> None:
        self.globs = tuple(globs)
        self.matched: set[str] = set()
        patterns = (fnmatch.translate(glob.replace("[", "[[]")) for glob in self.globs)
        self._any = re.compile("|".join(patterns)) if self.globs else None

    def match(self, *names: str) -> str | None:
        """The first glob that matches one of the ``names``; None if none does."""
        if self._any is None or not any(map(self._any.match, names)):
            return None
        found = [glob for glob in self.globs if any(matches(glob, name) for name in names)]
        self.matched.update(found)
        return found[0]


class PathRules:
    """Rules that give paths of other machines the paths that they have here.

    Args:
        rules: by glob of a folder or file on the other machine, its path here. The first rule whose
            glob matches a path, or the shortest folder above it, applies.

    Raises:
        OptionError: a rule leads to a path that the rules would change again.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = [
            # Traces have real paths.
            (re.compile(_path_pattern(glob) + r"(?=/|\Z)", re.DOTALL), os.path.realpath(target))
            for glob, target in rules.items()
        ]
        for _, target in self._rules:
            if (again := self.apply(target)) != target:
                raise OptionError(
                    f"paths: {target} would become {again} if runs are combined again; no rule may "
                    "change the path that another one leads to"
                )

    def apply(self, path: str) -> str:
        """The path here; the same if no rule matches it."""
        for pattern, target in self._rules:
            if (found := pattern.match(path)) is not None:
                return target.rstrip("/") + path[found.end() :]
        return path


def _path_pattern(glob: str) -> str:
    pieces = {"*": ".*?", "?": "."}
    return "".join(pieces.get(c, re.escape(c)) for c in glob.rstrip("/"))


def globs_of(settings: Settings, option: str) -> tuple[str, ...]:
    """The globs of an option that holds globs, or limits of libraries."""
    section, _, key = option.partition(".")
    value = getattr(getattr(settings, section), key)
    return tuple(value.libraries if isinstance(value, Limits) else value)


def ask_for_distributions(settings: Settings) -> bool:
    """Whether a glob on libraries needs to know what installed each, which takes long to find."""
    globs = (glob for option in _LIBRARY_OPTIONS for glob in globs_of(settings, option))
    return any(glob.startswith(DISTRIBUTION_PREFIX) for glob in globs)


def unmatched_globs(
    settings: Settings, option: str, matched: Collection[str], candidates: Iterable[str] = ()
) -> tuple[str, ...]:
    """A warning for each glob of ``option`` (``"keep.kernels"``) that matched nothing.

    Args:
        settings: where the globs and their places are.
        option: name of an option that holds globs.
        matched: the globs that matched something.
        candidates: the names they could have matched, distributions with ``dist:`` before
            them; the nearest is suggested.
    """
    lost = [glob for glob in globs_of(settings, option) if glob not in matched]
    names = tuple(candidates) if lost else ()
    what = "kernel" if option == "keep.kernels" else "library or file with GPU code"
    return tuple(
        f"{settings.sources[option]}: {option}: {glob!r} matches no {what} of this run"
        f"{did_you_mean(glob, names)}"
        for glob in lost
    )


def unmatched_libraries(
    settings: Settings, option: str, names: Collection[LibraryNames]
) -> tuple[str, ...]:
    """A warning for each glob of an option on libraries that matches none of these."""
    globs = globs_of(settings, option)
    matched = {glob for glob in globs if any(matches_library(glob, one) for one in names)}
    words = [
        word
        for one in names
        for word in (
            Path(one.path).name,
            one.soname,
            one.distribution and f"{DISTRIBUTION_PREFIX}{one.distribution}",
        )
        if word is not None
    ]
    return unmatched_globs(settings, option, matched, words)
