"""``negativa slim PACKAGE --target DIR``: a wheel or conda package to a smaller one of its name.

Its files are unpacked to a temporary folder, slimmed there, and packed again with new digests. A
package in which nothing is slimmed becomes a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archive_kinds import WHEEL_SUFFIX
from pytest_negativa.images.archives import damage
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.conda import unpack_conda
from pytest_negativa.slimming.request import OnProgress, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.wheel import unpack_wheel
from pytest_negativa.storage.atomic import NewFile
from pytest_negativa.storage.shared_folders import make_folder

Pack = Callable[[BinaryIO, bytes], None]
"""Packs the files of a folder, as they are now, into a file; with a notice."""

_STEP = 1 << 20
_NOTICE_TEXT = """\
This package is not the original. negativa slim (pytest-negativa) removed GPU code from these files:

{files}

Its lists have their new digests. A program that needs the removed code fails with a CUDA error, or
finds no file; then install the original package of the same version.

The licence of the original applies to it: see METADATA of a wheel, info/licenses of a conda
package. A licence may limit how libraries are changed and passed on. NVIDIA's agreements do, and
the package of another vendor may have libraries of NVIDIA. Check the terms before you pass this
package on.
"""


def slim_package(
    request: SlimRequest, on_progress: OnProgress = lambda done, total: None
) -> SlimReport:
    """Write a smaller package; ``request.paths`` has the package, ``request.target`` the folder.

    Nothing is written if a library fails.

    Raises:
        OptionError: the request contradicts itself; nothing was done.
        NegativaError: the package can't be read, or the new one can't be written.
    """
    package, target = _check(request)
    work = target if target.is_dir() and not request.options.dry_run else None
    with unpacked_package(package, work) as (folder, pack):
        report = slim_trees(dataclasses.replace(request, paths=(folder,), target=None), on_progress)
        if report.failed or request.options.dry_run:
            return report
        slimmed = [row for row in report.rows if row.status is SlimStatus.SLIMMED]
        with damage(str(package)):
            _write(target / package.name, package, pack, slimmed)
    return report


@contextlib.contextmanager
def unpacked_package(package: Path, work: Path | None = None) -> Iterator[tuple[Path, Pack]]:
    """All files of a package in a temporary folder, which goes at the end, and how to pack them.

    Args:
        package: the wheel or conda package.
        work: where the temporary folder is made; None: where the system has such.

    Raises:
        NegativaError: the package can't be read or unpacked.
    """
    unpack = unpack_wheel if package.suffix == WHEEL_SUFFIX else unpack_conda
    with (
        ByteSource(package) as source,
        tempfile.TemporaryDirectory(dir=work, prefix=".negativa-") as temporary,
    ):
        folder = Path(temporary)
        with damage(source.path), refusing(folder, "filled", ReconstructError):
            pack = unpack(source, folder)
        yield folder, pack


def _check(request: SlimRequest) -> tuple[Path, Path]:
    [package, *more] = request.paths
    target = request.target
    if more:
        raise OptionError(f"{package}: slim takes one package at a time, and nothing beside it")
    if target is None:
        raise OptionError(
            f"{package}: a package needs --target DIR, the folder for the smaller package"
        )
    if request.options.spare is not None:
        raise OptionError(f"{package}: --spare takes installed libraries, not packages")
    try:
        ByteSource(package).close()
    except FormatError as e:
        raise OptionError(str(e)) from e
    if os.path.lexists(target / package.name):
        raise OptionError(f"{target / package.name} exists; name another folder, or move it away")
    if not request.options.dry_run:
        make_folder(target)
        if not os.access(target, os.W_OK | os.X_OK):
            raise ReconstructError(f"{target}: cannot be written: Permission denied")
    return package, target


def _write(target: Path, package: Path, pack: Pack, slimmed: Sequence[SlimRow]) -> None:
    with refusing(target, "written", ReconstructError), NewFile(target) as new:
        if slimmed:
            with open(new.fd, "w+b", closefd=False) as file:
                pack(file, _notice(slimmed))
        else:
            with package.open("rb") as old, open(new.fd, "wb", closefd=False) as file:
                shutil.copyfileobj(old, file, _STEP)
        os.fchmod(new.fd, stat.S_IMODE(package.stat().st_mode))
        new.publish(durable=True, replace=False)


def _notice(slimmed: Sequence[SlimRow]) -> bytes:
    lines = (f"{row.path}: {row.detail}" if row.detail else row.path for row in slimmed)
    files = "\n".join(f"    {line}" for line in lines)
    return _NOTICE_TEXT.format(files=files).encode()
