"""``negativa slim PACKAGE --target DIR``: a wheel or conda package to a smaller one; its NOTICE.

Its files are unpacked to a temporary folder, slimmed there, and packed again with new digests. A
package in which nothing is slimmed becomes a copy.

Wheels: PEP 427. Conda packages: "Package specification" of conda's documentation.
``info/paths.json`` has the digest and the size of each file as it lies in the package. An installer
may replace a placeholder for the prefix in a file, and pads the string that holds it up to its zero
byte. Slimming drops elements and sections as a whole, and moves no string, so a placeholder stays
with its zeros, or goes with the bytes around it.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import dataclasses
import functools
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import zstandard

from pytest_negativa.errors import FormatError, OptionError, ReconstructError, refusing
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.images.archive_kinds import WHEEL_SUFFIX
from pytest_negativa.images.archives import (
    CONDA_FILES,
    ENCRYPTED,
    File,
    SourceStream,
    clean_name,
    damage,
    iter_archive,
    iter_headers,
    open_zip,
)
from pytest_negativa.images.overlay import HardLink
from pytest_negativa.installed.record import RECORD, record_digest
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.request import OnProgress, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.storage.atomic import NewFile
from pytest_negativa.storage.shared_folders import make_folder

NOTICE = "NEGATIVA-NOTICE.txt"
"""Name of the notice, in the ``.dist-info`` folder of a wheel or ``info`` of a conda package."""

Pack = Callable[[BinaryIO, bytes], None]
"""Packs the files of a folder, as they are now, into a file; with a notice."""

# Signatures of RECORD, which changes.
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_FILES, _PATHS, _CONDA_NOTICE = "info/files", "info/paths.json", f"info/{NOTICE}"
_WHEEL_RECORD = re.compile(rf"[^/]+\.dist-info/{RECORD}")
# That of conda-package-handling.
_LEVEL = 19
_STEP = 1 << 20
# Bytes; of a larger file, the header has its size in another form.
_MAX_ZIP32 = 1 << 30

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
        OptionError: the folder has such a package, or see ``slim_trees``; nothing was done.
        NegativaError: the package can't be read, or the new one can't be written.
    """
    [package], target = request.paths, request.target
    assert target is not None, "a package is never slimmed in place"
    _check(package, target, dry_run=request.options.dry_run)
    work = None if request.options.dry_run else target
    with unpacked_package(package, work) as (folder, pack):
        report = slim_trees(dataclasses.replace(request, paths=(folder,)), on_progress)
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
    unpack = _unpack_wheel if package.suffix == WHEEL_SUFFIX else _unpack_conda
    with (
        ByteSource(package) as source,
        tempfile.TemporaryDirectory(dir=work, prefix=".negativa-") as temporary,
    ):
        folder = Path(temporary)
        with damage(source.path), refusing(folder, "filled", ReconstructError):
            pack = unpack(source, folder)
        yield folder, pack


def _check(package: Path, target: Path, *, dry_run: bool) -> None:
    """Make the folder for the smaller package, and refuse one that can't take it."""
    if os.path.lexists(target / package.name):
        raise OptionError(f"{target / package.name} exists; name another folder, or move it away")
    if not dry_run:
        make_folder(target)
        if not os.access(target, os.W_OK | os.X_OK):
            raise ReconstructError(f"{target}: cannot be written: Permission denied")


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
    lines = (
        f"    {row.path}: {row.detail}" if row.detail else f"    {row.path}" for row in slimmed
    )
    return _NOTICE_TEXT.format(files="\n".join(lines)).encode()


# ---- Wheels ----


def _unpack_wheel(source: ByteSource, folder: Path) -> Pack:
    """Unpack a wheel into a folder; the result packs it.

    Raises:
        FormatError: the wheel is damaged, or none.
    """
    archive = open_zip(source)
    for info in archive.infolist():
        if clean_name(info.filename) != info.filename.rstrip("/"):
            raise FormatError(source.path, None, f"{info.filename!r} leads out of the archive")
        if info.flag_bits & ENCRYPTED:
            raise FormatError(source.path, None, f"{info.filename!r} is encrypted")
    # A name may be there twice; the last one counts, as for pip.
    infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    archive.extractall(folder, infos)  # noqa: S202 (a ZIP archive; its names were checked)
    records = [Path(name) for name in infos if _WHEEL_RECORD.fullmatch(name)]
    if len(records) != 1:
        problem = f"has {len(records)} folders *.dist-info with RECORD, expected 1; no wheel"
        raise FormatError(source.path, None, problem)
    return functools.partial(_pack_wheel, folder, infos, records[0])


def _pack_wheel(
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
            with (
                (folder / name).open("rb") as data,
                _open_member(packed, name, infos.get(name, like)) as into,
            ):
                shutil.copyfileobj(data, into, _STEP)


def _open_member(packed: zipfile.ZipFile, name: str, like: zipfile.ZipInfo) -> IO[bytes]:
    """Open a new file in a ZIP archive for writing, with the attributes of another one."""
    new = zipfile.ZipInfo(name, like.date_time)
    new.compress_type, new.external_attr = like.compress_type, like.external_attr
    new.create_system = like.create_system
    return packed.open(new, "w", force_zip64=like.file_size > _MAX_ZIP32)


# ---- Conda packages ----


def _unpack_conda(source: ByteSource, folder: Path) -> Pack:
    """Unpack a conda package into a folder; the result packs it.

    Symbolic links are packed, and not made in the folder: slimming follows none.

    Raises:
        FormatError: the package is damaged, or none.
    """
    for name, entry in iter_archive(Path(source.path), _refuse):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, HardLink):
            os.link(folder / (clean_name(entry.target) or ""), path)
        elif isinstance(entry, File):
            with path.open("wb") as file:
                while data := _read(entry.stream or io.BytesIO(), source.path):
                    file.write(data)
    states = {
        path.relative_to(folder).as_posix(): FileState.of(path.stat())
        for path in folder.rglob("*")
        if path.is_file()
    }
    try:
        listed = msgspec.json.decode((folder / _PATHS).read_bytes(), type=dict[str, Any])
        listed["paths"] = msgspec.convert(listed.get("paths"), list[dict[str, Any]])
    except (FileNotFoundError, *UNDECODABLE) as e:
        raise FormatError(source.path, None, f"no conda package, or damaged: {_PATHS}: {e}") from e
    return functools.partial(_pack_conda, source, folder, states, listed)


def _refuse(problem: FormatError) -> None:
    raise problem


def _read(stream: BinaryIO, label: str) -> bytes:
    # A full disk is another matter.
    with damage(label):
        return stream.read(_STEP)


def _pack_conda(
    source: ByteSource,
    folder: Path,
    states: Mapping[str, FileState],
    listed: dict[str, Any],
    file: BinaryIO,
    notice: bytes,
) -> None:
    _update_lists(folder, states, listed)
    if not zipfile.is_zipfile(source.path):
        with bz2.open(file, "wb") as packed:
            _pack_tar(SourceStream(source), source.path, packed, folder, notice)
        return
    with open_zip(source) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            with old.open(info) as part, _open_member(new, info.filename, info) as into:
                if CONDA_FILES.fullmatch(info.filename) is None:
                    shutil.copyfileobj(part, into)
                else:
                    # With threads, for as many as there are processors.
                    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=-1)
                    with compressor.stream_writer(into, closefd=False) as stream:
                        _pack_tar(part, f"{source.path}/{info.filename}", stream, folder, notice)


def _update_lists(folder: Path, states: Mapping[str, FileState], listed: dict[str, Any]) -> None:
    """Write digests and sizes of changed files into the lists, which lose removed ones."""
    entries: dict[str, dict[str, Any]] = {str(one.get("_path")): one for one in listed["paths"]}
    gone = {name for name in states if not (folder / name).exists()}
    digests: dict[str, str | None] = {}
    for name in entries.keys() & states.keys() - gone:
        path, entry = folder / name, entries[name]
        if FileState.of(status := path.stat()) != states[name]:
            digests[str(entry.get("sha256"))] = entry["sha256"] = digest_of(path)
            entry["size_in_bytes"] = status.st_size
    # An entry of a link has the digest of its file.
    for name in entries.keys() - states.keys():
        if (digest := str(entries[name].get("sha256"))) in digests:
            entries[name]["sha256"] = digests[digest]
    listed["paths"] = [one for name, one in entries.items() if name not in gone]
    (folder / _PATHS).write_bytes(msgspec.json.format(msgspec.json.encode(listed)))
    if gone and (names := folder / _FILES).is_file():
        kept = (line for line in names.read_text().splitlines() if line not in gone)
        names.write_text("".join(f"{line}\n" for line in kept))


def _pack_tar(
    part: IO[bytes] | SourceStream, label: str, new: Any, folder: Path, notice: bytes
) -> None:
    """Pack the files of a folder that are in an old tar archive, with their attributes."""
    with tarfile.open(fileobj=new, mode="w|") as packed:
        for info in iter_headers(part, label):
            path = folder / (name := clean_name(info.name) or "")
            if info.issparse():
                raise FormatError(f"{label}/{name}", None, "is stored as a sparse file; not packed")
            if name == _CONDA_NOTICE or ((info.isreg() or info.islnk()) and not path.exists()):
                continue
            # Of the old file; its size would win.
            info.pax_headers = {}
            content = path.open("rb") if info.isreg() else io.BytesIO()
            with content:
                info.size = path.stat().st_size if info.isreg() else 0
                packed.addfile(info, content)
            if name == _PATHS:
                added = tarfile.TarInfo(_CONDA_NOTICE)
                added.size = len(notice)
                packed.addfile(added, io.BytesIO(notice))
