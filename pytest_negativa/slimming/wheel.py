"""``negativa slim X.whl --target DIR``: a wheel to a smaller one of the same name.

Its files are unpacked to a temporary folder, slimmed there, and packed again with a new RECORD. A
wheel in which nothing is slimmed becomes a copy. Format: PEP 427.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archives import ENCRYPTED, clean_name, damage, open_zip
from pytest_negativa.installed.record import RECORD, record_digest
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.request import OnProgress, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.storage.atomic import new_file
from pytest_negativa.storage.shared_folders import make_folder

NOTICE = "NEGATIVA-NOTICE.txt"
"""Name of the notice, in the wheel's ``.dist-info`` folder."""

_DIST_INFO = ".dist-info"
# Signatures of RECORD, which changes (PEP 427).
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_STEP = 1 << 20
# Bytes; of a larger file, the header has its size in another form.
_MAX_ZIP32 = 1 << 30
_NOTICE_TEXT = """\
This wheel is not the original. negativa slim (pytest-negativa) removed GPU code from these files:

{files}

RECORD has their new digests. A program that needs the removed code fails with a CUDA error, or
finds no file; then install the original wheel of the same version.

The licence of the original applies to it: see METADATA. A licence may limit how libraries are
changed and passed on. NVIDIA's agreements do, and the wheel of another vendor may have libraries of
NVIDIA. Check the terms before you pass this wheel on.
"""


def slim_wheel(
    request: SlimRequest, on_progress: OnProgress = lambda done, total: None
) -> SlimReport:
    """Write a smaller wheel; ``request.paths`` has the wheel, ``request.target`` the folder.

    Nothing is written if a library fails.

    Raises:
        OptionError: the request contradicts itself; nothing was done.
        NegativaError: the wheel can't be read, or the new one can't be written.
    """
    wheel, target = _check(request)
    work = target if target.is_dir() and not request.options.dry_run else None
    with unpacked_wheel(wheel, work) as (folder, infos):
        info_folder = _dist_info(infos, wheel)
        report = slim_trees(dataclasses.replace(request, paths=(folder,), target=None), on_progress)
        if report.failed or request.options.dry_run:
            return report
        slimmed = [row for row in report.rows if row.status is SlimStatus.SLIMMED]
        with damage(str(wheel)):
            _write(target / wheel.name, wheel, folder, infos, info_folder, slimmed)
    return report


@contextlib.contextmanager
def unpacked_wheel(
    wheel: Path, work: Path | None = None
) -> Iterator[tuple[Path, list[zipfile.ZipInfo]]]:
    """All files of a wheel in a temporary folder, which goes at the end, and their list.

    Args:
        wheel: the wheel.
        work: where the temporary folder is made; None: where the system has such.

    Raises:
        NegativaError: the wheel can't be read or unpacked.
    """
    with (
        ByteSource(wheel) as source,
        tempfile.TemporaryDirectory(dir=work, prefix=".negativa-") as temporary,
    ):
        archive = open_zip(source)
        infos = [info for info in _files_of(archive, source.path) if not info.is_dir()]
        with damage(source.path), refusing(temporary, "filled", ReconstructError):
            archive.extractall(temporary, infos)
        yield Path(temporary), infos


def _check(request: SlimRequest) -> tuple[Path, Path]:
    [wheel, *more] = request.paths
    target = request.target
    if more:
        raise OptionError(f"{wheel}: slim takes one wheel at a time, and nothing beside it")
    if target is None:
        raise OptionError(f"{wheel}: a wheel needs --target DIR, the folder for the smaller wheel")
    if request.options.spare is not None:
        raise OptionError(f"{wheel}: --spare takes installed libraries, not wheels")
    try:
        ByteSource(wheel).close()
    except FormatError as e:
        raise OptionError(str(e)) from e
    if os.path.lexists(target / wheel.name):
        raise OptionError(f"{target / wheel.name} exists; name another folder, or move it away")
    if not request.options.dry_run:
        make_folder(target)
        if not os.access(target, os.W_OK | os.X_OK):
            raise ReconstructError(f"{target}: cannot be written: Permission denied")
    return wheel, target


def _files_of(archive: zipfile.ZipFile, path: str) -> list[zipfile.ZipInfo]:
    infos = archive.infolist()
    seen: set[str] = set()
    for info in infos:
        if clean_name(info.filename) != info.filename.rstrip("/"):
            raise FormatError(path, None, f"{info.filename!r} leads out of the archive")
        if info.filename in seen:
            raise FormatError(path, None, f"{info.filename!r} is there twice")
        if info.flag_bits & ENCRYPTED:
            raise FormatError(path, None, f"{info.filename!r} is encrypted")
        seen.add(info.filename)
    return infos


def _dist_info(infos: Sequence[zipfile.ZipInfo], path: Path) -> str:
    folders = {
        folder
        for folder, _, name in (info.filename.rpartition("/") for info in infos)
        if name == RECORD and folder.endswith(_DIST_INFO) and "/" not in folder
    }
    if len(folders) != 1:
        raise FormatError(
            path, None, f"has {len(folders)} folders *.dist-info with RECORD, expected 1; no wheel"
        )
    return folders.pop()


def _write(
    target: Path,
    wheel: Path,
    folder: Path,
    infos: Sequence[zipfile.ZipInfo],
    info_folder: str,
    slimmed: Sequence[SlimRow],
) -> None:
    """Write the new wheel, from the files in a folder that are on the list of the old one."""
    with refusing(target, "written", ReconstructError), new_file(target) as new:
        if slimmed:
            with open(new.fd, "w+b", closefd=False) as file:
                _pack(file, folder, infos, info_folder, _notice(slimmed))
        else:
            with wheel.open("rb") as old, open(new.fd, "wb", closefd=False) as file:
                shutil.copyfileobj(old, file, _STEP)
        os.fchmod(new.fd, stat.S_IMODE(wheel.stat().st_mode))
        new.publish(durable=True, replace=False)


def _pack(
    file: BinaryIO,
    folder: Path,
    infos: Sequence[zipfile.ZipInfo],
    info_folder: str,
    notice: bytes,
) -> None:
    """Pack files; the metadata comes last, and RECORD, which has no row for itself, at the end."""
    record = next(info for info in infos if info.filename == f"{info_folder}/{RECORD}")
    left_out = {record.filename, *(f"{info_folder}/{name}" for name in (*_SIGNATURES, NOTICE))}
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    with zipfile.ZipFile(file, "w") as packed:

        def add(name: str, like: zipfile.ZipInfo, content: BinaryIO) -> None:
            new = zipfile.ZipInfo(name, like.date_time)
            new.compress_type, new.external_attr = like.compress_type, like.external_attr
            new.create_system = like.create_system
            digest, size = hashlib.sha256(), 0
            with packed.open(new, "w", force_zip64=like.file_size > _MAX_ZIP32) as into:
                while data := content.read(_STEP):
                    digest.update(data)
                    size += into.write(data)
            rows.writerow((name, record_digest(digest.hexdigest()), size))

        for info in infos:
            path = folder / info.filename
            if path.exists() and info.filename not in left_out:
                with path.open("rb") as content:
                    add(info.filename, info, content)
        add(f"{info_folder}/{NOTICE}", record, io.BytesIO(notice))
        rows.writerow((record.filename, "", ""))
        add(record.filename, record, io.BytesIO(text.getvalue().encode()))


def _notice(slimmed: Sequence[SlimRow]) -> bytes:
    lines = (f"{row.path}: {row.detail}" if row.detail else row.path for row in slimmed)
    files = "\n".join(f"    {line}" for line in lines)
    return _NOTICE_TEXT.format(files=files).encode()
