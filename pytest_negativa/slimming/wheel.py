"""``negativa slim X.whl --target DIR``: a wheel to a smaller one of the same name.

The libraries, the files that are GPU code by their names, and the metadata are unpacked to a
temporary folder and slimmed there, which changes the rows of libraries in RECORD, too. The rows of
removed files go. Files that did not change go from wheel to wheel as they are packed. Format: PEP
427.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import os
import posixpath
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from pytest_negativa.errors import FormatError, OptionError, ReconstructError
from pytest_negativa.gpucode.source import ByteSource, Stamp, stamp_of
from pytest_negativa.images.archives import ENCRYPTED, clean_name, damage, open_zip
from pytest_negativa.installed.record import RECORD, iter_rows, record_digest
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.reporting.text import printable
from pytest_negativa.slimming.code_files import is_named_like_code
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.slim import OnProgress, SlimReport, SlimRequest, slim_trees
from pytest_negativa.storage.atomic import new_file
from pytest_negativa.storage.shared_folders import make_folder

NOTICE = "NEGATIVA-NOTICE.txt"
"""Name of the notice, in the wheel's ``.dist-info`` folder."""

_DIST_INFO = ".dist-info"
# Signatures of RECORD, which changes (PEP 427).
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_STEP = 1 << 20
# The header before the bytes of a file: lengths of the name and the extra field that follow
# (APPNOTE 4.3.7).
_HEADER = struct.Struct("<26xHH")
# What a method needs to unpack the bytes (APPNOTE 4.4.4).
_METHOD_FLAGS = 0x6
_NOTICE_TEXT = """\
This wheel is not the original. negativa slim (pytest-negativa) removed GPU code from these files:

{files}

RECORD has their new digests. A program that needs the removed code fails with a CUDA error, or
finds no file; then install the original wheel of the same version.

The licence of the original applies to it. The wheel's METADATA says:

{terms}

A licence may limit how libraries are changed and passed on. NVIDIA's agreements do, and the wheel
of another vendor may have libraries of NVIDIA. Check the terms before you pass this wheel on.
"""
_TERMS = {
    "distribution": ("Name", "Version"),
    "from": ("Author", "Author-email", "Maintainer", "Maintainer-email"),
    "licence": ("License-Expression", "License"),
    "its text": ("License-File",),
}
_MAX_TERM = 200


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
    with (
        ByteSource(wheel) as source,
        tempfile.TemporaryDirectory(dir=work, prefix=".negativa-") as temporary,
    ):
        folder = Path(temporary)
        archive = open_zip(source)
        infos = _files_of(archive, source.path)
        info_folder = _dist_info(infos, source.path)
        with damage(source.path):
            unpacked = _unpack(archive, [i for i in infos if _is_unpacked(i)], folder)
        report = slim_trees(dataclasses.replace(request, paths=(folder,), target=None), on_progress)
        if not report.failed and not request.options.dry_run:
            manifest = load_manifest(folder)
            record = folder / info_folder / RECORD
            _update_record(record, manifest.slimmed.keys(), manifest.removed.keys(), source.path)
            _add_notice(folder / info_folder, report.rows)
            stay = [info for info in infos if info.filename not in manifest.removed]
            with damage(source.path):
                _pack(archive, stay, folder, info_folder, target / wheel.name, source, unpacked)
    return report


@contextlib.contextmanager
def unpacked_wheel(wheel: Path) -> Iterator[Path]:
    """All files of a wheel in a temporary folder, which goes at the end.

    Raises:
        NegativaError: the wheel can't be read or unpacked.
    """
    with ByteSource(wheel) as source, tempfile.TemporaryDirectory(prefix="negativa-") as temporary:
        archive = open_zip(source)
        infos = [info for info in _files_of(archive, source.path) if not info.is_dir()]
        with damage(source.path):
            _unpack(archive, infos, Path(temporary))
        yield Path(temporary)


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


def _is_unpacked(info: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(info.filename)
    is_wanted = ".so" in path.name or is_named_like_code(path.name)
    return not info.is_dir() and (is_wanted or path.parts[0].endswith(_DIST_INFO))


def _unpack(
    archive: zipfile.ZipFile, infos: Sequence[zipfile.ZipInfo], folder: Path
) -> dict[str, Stamp]:
    """Unpack files; returns the stamp of each by its name."""
    size, free = sum(info.file_size for info in infos), shutil.disk_usage(folder).free
    if size > free:
        raise ReconstructError(
            f"{folder.parent}: the wheel's files take {size:,} bytes while they are unpacked, "
            f"and {free:,} are free"
        )
    try:
        for info in infos:
            path = folder / info.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as packed, path.open("xb") as file:
                shutil.copyfileobj(packed, file, _STEP)
        return {info.filename: stamp_of((folder / info.filename).stat()) for info in infos}
    except OSError as e:
        raise ReconstructError(f"{path}: cannot be written: {e.strerror}") from e


def _update_record(record: Path, slimmed: Set[str], removed: Set[str], wheel: str) -> None:
    """Take the rows of removed files out of RECORD.

    Raises:
        FormatError: it has no row for a slimmed library or a removed file, or is damaged, so it
            would not fit the new wheel.
    """
    rows: list[tuple[str, str]] = []
    with contextlib.suppress(UnicodeDecodeError, csv.Error):
        text = record.read_bytes().decode()
        rows = [(posixpath.normpath(row[0]) if row else "", line) for line, row in iter_rows(text)]
    for name in sorted((slimmed | removed) - {name for name, _ in rows}):
        problem = f"RECORD has no row for {name}, or is damaged; build the wheel again"
        raise FormatError(wheel, None, problem)
    if removed:
        record.write_bytes("".join(line for name, line in rows if name not in removed).encode())


def _add_notice(info_folder: Path, rows: Sequence[SlimRow]) -> None:
    slimmed = [row for row in rows if row.status is SlimStatus.SLIMMED]
    if not slimmed:
        return
    lines = (f"{row.path}: {row.detail}" if row.detail else row.path for row in slimmed)
    files = "\n".join(f"    {line}" for line in lines)
    terms = "\n".join(f"    {line}" for line in _terms(info_folder))
    notice = _NOTICE_TEXT.format(files=files, terms=terms).encode()
    (info_folder / NOTICE).write_bytes(notice)
    digest = record_digest(hashlib.sha256(notice).hexdigest())
    record = info_folder / RECORD
    text = record.read_bytes()
    line_end = b"\r\n" if b"\r\n" in text else b"\n"
    row = f"{info_folder.name}/{NOTICE},{digest},{len(notice)}".encode()
    text = text if text.endswith(b"\n") else text + line_end
    record.write_bytes(text + row + line_end)


def _terms(info_folder: Path) -> Iterator[str]:
    """Who made the original, and under which licence, as its metadata has them."""
    path = info_folder / "METADATA"
    # Its headers are UTF-8, unlike those of a mail.
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    metadata = HeaderParser().parsestr(text)
    for what, names in _TERMS.items():
        # "License" may hold the whole text of one.
        values = [str(value).strip() for name in names for value in metadata.get_all(name, ())]
        lines = [value.splitlines()[0] for value in values if value]
        told = printable(", ".join(line[:_MAX_TERM] for line in lines))
        yield f"{what}: {told or 'not told'}"


def _pack(
    archive: zipfile.ZipFile,
    infos: Sequence[zipfile.ZipInfo],
    folder: Path,
    info_folder: str,
    target: Path,
    source: ByteSource,
    unpacked: Mapping[str, Stamp],
) -> None:
    try:
        with new_file(target) as new:
            with (
                open(new.fd, "wb", closefd=False) as file,
                zipfile.ZipFile(file, "w") as packed,
            ):
                for info in _in_new_order(infos, folder, info_folder):
                    path = folder / info.filename
                    if path.is_file() and stamp_of(path.stat()) != unpacked.get(info.filename):
                        _add(info, path, packed)
                    else:
                        old = archive.getinfo(info.filename)
                        # The name before the packed bytes and, behind them, the checksum may not
                        # be those of the directory.
                        with archive.open(old) as content:
                            while info.filename not in unpacked and content.read(_STEP):
                                pass
                        _copy(source, old, packed)
            os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode))
            new.publish(durable=True, replace=False)
    except OSError as e:
        raise ReconstructError(f"{target}: cannot be written: {e.strerror}") from e


def _in_new_order(
    infos: Sequence[zipfile.ZipInfo], folder: Path, info_folder: str
) -> Iterator[zipfile.ZipInfo]:
    """The files of the new wheel; the metadata comes last, and RECORD at the end (PEP 427)."""
    record = f"{info_folder}/{RECORD}"
    signatures = {f"{info_folder}/{name}" for name in _SIGNATURES}
    notice = f"{info_folder}/{NOTICE}"
    yield from (i for i in infos if i.filename not in {record, notice, *signatures})
    for i in infos:
        if i.filename == record:
            if (folder / notice).exists():
                added = zipfile.ZipInfo(notice, i.date_time)
                added.compress_type, added.external_attr = i.compress_type, i.external_attr
                yield added
            yield i


def _new_info(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    new = zipfile.ZipInfo(info.filename, info.date_time)
    new.compress_type, new.external_attr = info.compress_type, info.external_attr
    new.create_system = info.create_system
    return new


def _add(info: zipfile.ZipInfo, path: Path, packed: zipfile.ZipFile) -> None:
    new = _new_info(info)
    new.file_size = path.stat().st_size
    with path.open("rb") as content, packed.open(new, "w") as file:
        shutil.copyfileobj(content, file, _STEP)


def _copy(source: ByteSource, info: zipfile.ZipInfo, packed: zipfile.ZipFile) -> None:
    """Copy the packed bytes of a file; zipfile has no call for that."""
    file = packed.fp
    assert file is not None
    lengths = _HEADER.unpack(source.read(info.header_offset, _HEADER.size))
    start = info.header_offset + _HEADER.size + sum(lengths)
    new = _new_info(info)
    new.CRC, new.file_size, new.compress_size = info.CRC, info.file_size, info.compress_size
    new.flag_bits = info.flag_bits & _METHOD_FLAGS
    new.header_offset = file.tell()
    file.write(new.FileHeader())
    for done in range(0, info.compress_size, _STEP):
        file.write(source.read(start + done, min(_STEP, info.compress_size - done)))
    packed.filelist.append(new)
    packed.NameToInfo[new.filename] = new
    packed.start_dir = file.tell()
