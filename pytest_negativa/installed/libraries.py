"""Files with GPU code of a file, folder or distribution that a user names."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import OptionError, did_you_mean
from pytest_negativa.models.file_kinds import is_named_code, is_spare, kind_of
from pytest_negativa.storage.system import read_head

# The first bytes of their programs don't count: pip has some in each environment.


class LibrarySet(NamedTuple):
    """The files that one argument names.

    Attributes:
        label: a title for people: the argument, or name and version of the distribution.
        paths: real paths, each file once.
        explicit: the argument named this one file.
        distribution: name and version of the wheel that the argument names.
        unlisted: why folders below the named one can't be listed.
    """

    label: str
    paths: tuple[Path, ...]
    explicit: bool
    distribution: str | None = None
    unlisted: tuple[OptionError, ...] = ()


def find_libraries(
    argument: str, *, with_dependencies: bool = False, names: Collection[str] | None = None
) -> LibrarySet:
    """Find the files that an argument names.

    A path that exists is that file, or all files below that folder whose first bytes tell that they
    may hold GPU code (``file_kinds.kind_of``). Anything else is the name of an installed
    distribution and stands for its files of these kinds.

    Args:
        argument: a path or the name of a distribution.
        with_dependencies: whether to add the distributions that it requires.
        names: of the files that are wanted; others are not opened. The file that ``argument`` is
            counts in any case.

    Raises:
        OptionError: neither a path nor an installed distribution.
    """
    if not argument:
        raise OptionError("an empty name; expected a file, a folder or an installed distribution")
    path = Path(argument)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as e:
        if os.sep in argument or path.is_symlink():
            raise OptionError(f"{argument}: {_why_absent(path, e)}") from e
    else:
        if is_folder:
            unlisted: list[OptionError] = []
            paths = _unique(_iter_folder(path, unlisted), names)
            return LibrarySet(argument, paths, explicit=False, unlisted=tuple(unlisted))
        return LibrarySet(argument, (path,), explicit=True)
    return _of_distribution(argument, names, with_dependencies=with_dependencies)


def _of_distribution(
    argument: str, names: Collection[str] | None, *, with_dependencies: bool
) -> LibrarySet:
    # Imported late: importlib.metadata takes 20 ms.
    from pytest_negativa.installed.distributions import (
        find_distribution,
        find_distributions,
        has_name,
        with_requirements,
    )

    distribution = find_distribution(argument)
    if distribution is None:
        installed = {str(d.metadata["Name"]) for d in find_distributions() if has_name(d)}
        raise OptionError(
            f"{argument}: neither a file or folder nor a distribution that is installed for "
            f"{sys.executable}{did_you_mean(argument, installed, at_least=0.75)}"
        )
    distributions = list(with_requirements(distribution)) if with_dependencies else [distribution]
    label = f"{distribution.metadata['Name']} {distribution.version}"
    if len(distributions) > 1:
        label += f" and {len(distributions) - 1} distributions it requires"
    files = (str(d.locate_file(file)) for d in distributions for file in d.files or ())
    return LibrarySet(label, _unique(files, names), explicit=False)


def _why_absent(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be opened: {error.strerror}"
    return "a broken link" if path.is_symlink() else "no such file or folder"


def _iter_folder(folder: Path, unlisted: list[OptionError]) -> Iterator[str]:
    def check(error: OSError) -> None:
        problem = OptionError(f"{error.filename}: cannot be listed: {error.strerror}")
        if error.filename == os.fspath(folder):
            raise problem
        unlisted.append(problem)

    # os.walk does not follow links to folders.
    for root, folders, files in os.walk(folder, onerror=check):
        folders.sort()
        for name in sorted(files):
            if not is_spare(name):
                yield os.path.join(root, name)


def _unique(paths: Iterator[str], names: Collection[str] | None) -> tuple[Path, ...]:
    """The files of known kinds among ``paths``, of these names.

    Hard and symbolic links to the same file count once.
    """
    found: dict[tuple[int, int], Path] = {}
    for path in paths:
        if names is not None and path.rpartition(os.sep)[2] not in names:
            continue
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)  # noqa: PTH116 (a Path for each file takes longer)
            # Named pipes and devices below a folder must not be opened.
            is_new = (status.st_dev, status.st_ino) not in found
            if stat.S_ISREG(status.st_mode) and is_new and _may_hold_gpu_code(path):
                found[status.st_dev, status.st_ino] = Path(os.path.realpath(path))
    return tuple(found.values())


def _may_hold_gpu_code(path: str) -> bool:
    try:
        return kind_of(read_head(path)) is not None
    except PermissionError:
        # Without a library the totals would be wrong; the next reader reports the error.
        return is_named_code(path)
