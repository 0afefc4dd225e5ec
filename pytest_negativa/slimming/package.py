"""``negativa slim WHEEL --target DIR``: a wheel to a smaller one; its NOTICE.

Its files are unpacked to a temporary folder, slimmed there, and packed again with new digests. A
wheel in which nothing is slimmed becomes a copy. Wheels: PEP 427.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archives import ENCRYPTED, clean_name, damage, open_zip
from pytest_negativa.installed.record import RECORD, record_digest
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.request import OnProgress, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.storage.atomic import NewFile
from pytest_negativa.storage.shared_folders import make_folder

NOTICE = "NEGATIVA-NOTICE.txt"
"""Name of the notice, in the ``.dist-info`` folder of a wheel."""

Pack = Callable[[BinaryIO, bytes], None]
"""Packs the files of a folder, as they are now, into a file; with a notice."""

# Signatures of RECORD, which changes.
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_WHEEL_RECORD = re.compile(rf"[^/]+\.dist-info/{RECORD}")
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
        OptionError: the folder has such a wheel, or see ``slim_trees``; nothing was done.
        NegativaError: the wheel can't be read, or the new one can't be written.
    """
    [wheel], target = request.paths, request.target
    assert target is not None, "a wheel is never slimmed in place"
    if os.path.lexists(target / wheel.name):
        raise OptionError(f"{target / wheel.name} exists; name another folder, or move it away")
    is_dry = request.options.dry_run
    with unpacked_wheel(wheel, None if is_dry else target) as (folder, pack):
        report = slim_trees(dataclasses.replace(request, paths=(folder,)), on_progress)
        if report.failed or is_dry:
            return report
        slimmed = [row for row in report.rows if row.status is SlimStatus.SLIMMED]
        with damage(str(wheel)):
            _write(target / wheel.name, wheel, pack, slimmed)
    return report


@contextlib.contextmanager
def unpacked_wheel(wheel: Path, work: Path | None = None) -> Iterator[tuple[Path, Pack]]:
    """All files of a wheel in a temporary folder, which goes at the end, and how to pack them.

    Args:
        wheel: the file.
        work: where the temporary folder is made; None: where the system has such.

    Raises:
        FormatError: the wheel is damaged, or none.
        NegativaError: it can't be read or unpacked.
    """
    with ByteSource(wheel) as source:
        with damage(source.path):
            archive = open_zip(source)
        # A name may be there twice; the last one counts, as for pip.
        infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
        for info in archive.infolist():
            if clean_name(info.filename) != info.filename.rstrip("/"):
                raise FormatError(source.path, None, f"{info.filename!r} leads out of the archive")
            if info.flag_bits & ENCRYPTED:
                raise FormatError(source.path, None, f"{info.filename!r} is encrypted")
        records = [Path(name) for name in infos if _WHEEL_RECORD.fullmatch(name)]
        if len(records) != 1:
            problem = f"has {len(records)} folders *.dist-info with RECORD, expected 1; no wheel"
            raise FormatError(source.path, None, problem)
        if work is not None:
            make_folder(work)
            if not os.access(work, os.W_OK | os.X_OK):
                raise ReconstructError(f"{work}: cannot be written: Permission denied")
        with tempfile.TemporaryDirectory(dir=work, prefix=".negativa-") as temporary:
            folder = Path(temporary)
            with damage(source.path), refusing(folder, "filled", ReconstructError):
                archive.extractall(folder, infos)
            yield folder, functools.partial(_pack, folder, infos, records[0])


def _write(target: Path, wheel: Path, pack: Pack, slimmed: Sequence[SlimRow]) -> None:
    with refusing(target, "written", ReconstructError), NewFile(target) as new:
        if slimmed:
            with open(new.fd, "w+b", closefd=False) as file:
                pack(file, _notice(slimmed))
        else:
            with wheel.open("rb") as old, open(new.fd, "wb", closefd=False) as file:
                shutil.copyfileobj(old, file, _STEP)
        os.fchmod(new.fd, stat.S_IMODE(wheel.stat().st_mode))
        new.publish(durable=True, replace=False)


def _notice(slimmed: Sequence[SlimRow]) -> bytes:
    lines = (
        f"    {row.path}: {row.detail}" if row.detail else f"    {row.path}" for row in slimmed
    )
    return _NOTICE_TEXT.format(files="\n".join(lines)).encode()


def _pack(
    folder: Path,
    infos: Mapping[str, zipfile.ZipInfo],
    record: Path,
    file: BinaryIO,
    notice: bytes,
) -> None:
    """Pack files; the metadata comes last, and RECORD, which has no row for itself, at the end."""
    like, own = infos[str(record)], record.with_name(NOTICE)
    (folder / own).write_bytes(notice)
    left_out = {str(record.with_name(name)) for name in (*_SIGNATURES, NOTICE, RECORD)}
    found = [name for name in infos if name not in left_out and (folder / name).exists()]
    with (folder / record).open("w", encoding="utf-8", newline="") as text:
        rows = csv.writer(text, lineterminator="\n")
        for name in (*found, str(own)):
            with ByteSource(folder / name) as content:
                rows.writerow((name, record_digest(content.sha256()), content.size))
        rows.writerow((record, "", ""))
    with zipfile.ZipFile(file, "w") as packed:
        for name in (*found, str(own), str(record)):
            old = infos.get(name, like)
            new = zipfile.ZipInfo(name, old.date_time)
            new.compress_type, new.external_attr = old.compress_type, old.external_attr
            new.create_system = old.create_system
            is_large = old.file_size > _MAX_ZIP32
            with (
                (folder / name).open("rb") as data,
                packed.open(new, "w", force_zip64=is_large) as into,
            ):
                shutil.copyfileobj(data, into, _STEP)
