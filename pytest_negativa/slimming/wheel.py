"""Wheels (PEP 427): their files are unpacked, and packed again with a new RECORD."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archives import ENCRYPTED, clean_name, open_zip
from pytest_negativa.installed.record import RECORD, record_digest

NOTICE = "NEGATIVA-NOTICE.txt"
"""Name of the notice, in the ``.dist-info`` folder of a wheel or ``info`` of a conda package."""

_DIST_INFO = ".dist-info"
# Signatures of RECORD, which changes (PEP 427).
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_STEP = 1 << 20
# Bytes; of a larger file, the header has its size in another form.
_MAX_ZIP32 = 1 << 30


def unpack_wheel(source: ByteSource, folder: Path) -> Callable[[BinaryIO, bytes], None]:
    """Unpack a wheel into a folder; the result packs it, see ``slimming.package.Pack``.

    Raises:
        FormatError: the wheel is damaged, or none.
    """
    archive = open_zip(source)
    infos = [info for info in _files_of(archive, source.path) if not info.is_dir()]
    info_folder = _dist_info(infos, source.path)
    archive.extractall(folder, infos)
    return functools.partial(_pack, folder, infos, info_folder)


def open_member(packed: zipfile.ZipFile, name: str, like: zipfile.ZipInfo) -> IO[bytes]:
    """Open a new file in a ZIP archive for writing, with the attributes of another one."""
    new = zipfile.ZipInfo(name, like.date_time)
    new.compress_type, new.external_attr = like.compress_type, like.external_attr
    new.create_system = like.create_system
    return packed.open(new, "w", force_zip64=like.file_size > _MAX_ZIP32)


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


def _dist_info(infos: Sequence[zipfile.ZipInfo], path: str) -> str:
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


def _pack(
    folder: Path,
    infos: Sequence[zipfile.ZipInfo],
    info_folder: str,
    file: BinaryIO,
    notice: bytes,
) -> None:
    """Pack files; the metadata comes last, and RECORD, which has no row for itself, at the end."""
    record = next(info for info in infos if info.filename == f"{info_folder}/{RECORD}")
    left_out = {record.filename, *(f"{info_folder}/{name}" for name in (*_SIGNATURES, NOTICE))}
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    with zipfile.ZipFile(file, "w") as packed:

        def add(name: str, like: zipfile.ZipInfo, content: BinaryIO) -> None:
            digest, size = hashlib.sha256(), 0
            with open_member(packed, name, like) as into:
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
