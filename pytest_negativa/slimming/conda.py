"""Conda packages: their files are unpacked, and packed again with new lists below ``info/``.

Source: "Package specification" of conda's documentation. ``info/paths.json`` has the digest and the
size of each file as it lies in the package. An installer may replace a placeholder for the prefix
in a file, and pads the string that holds it up to its zero byte. Slimming drops elements and
sections as a whole, and moves no string, so a placeholder stays with its zeros, or goes with the
bytes around it.
"""

from __future__ import annotations

import bz2
import functools
import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import zstandard

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.images.archives import (
    CONDA_FILES,
    File,
    Part,
    clean_name,
    damage,
    iter_archive,
    iter_headers,
    open_zip,
)
from pytest_negativa.images.overlay import HardLink
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.slimming.wheel import NOTICE, open_member

_FILES, _PATHS, _NOTICE = "info/files", "info/paths.json", f"info/{NOTICE}"
# That of conda-package-handling.
_LEVEL = 19
_STEP = 1 << 20


def unpack_conda(source: ByteSource, folder: Path) -> Callable[[BinaryIO, bytes], None]:
    """Unpack a conda package into a folder; the result packs it, see ``slimming.package.Pack``.

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
    return functools.partial(_pack, source, folder, states, listed)


def _refuse(problem: FormatError) -> None:
    raise problem


def _read(stream: BinaryIO, label: str) -> bytes:
    # A full disk is another matter.
    with damage(label):
        return stream.read(_STEP)


def _pack(
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
            _pack_tar(Part(source), source.path, packed, folder, notice)
        return
    with open_zip(source) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            with old.open(info) as part, open_member(new, info.filename, info) as into:
                if CONDA_FILES.fullmatch(info.filename) is None:
                    shutil.copyfileobj(part, into)
                    continue
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
        lines = names.read_text().splitlines()
        names.write_text("".join(f"{line}\n" for line in lines if line not in gone))


def _pack_tar(part: IO[bytes] | Part, label: str, new: Any, folder: Path, notice: bytes) -> None:
    """Pack the files of a folder that are in an old tar archive, with their attributes."""
    with tarfile.open(fileobj=new, mode="w|") as packed:
        for info in iter_headers(part, label):
            path = folder / (name := clean_name(info.name) or "")
            if info.issparse():
                raise FormatError(f"{label}/{name}", None, "is stored as a sparse file; not packed")
            if name == _NOTICE or ((info.isreg() or info.islnk()) and not path.exists()):
                continue
            # Of the old file; its size would win.
            info.pax_headers = {}
            content = path.open("rb") if info.isreg() else io.BytesIO()
            with content:
                info.size = path.stat().st_size if info.isreg() else 0
                packed.addfile(info, content)
            if name == _PATHS:
                added = tarfile.TarInfo(_NOTICE)
                added.size = len(notice)
                packed.addfile(added, io.BytesIO(notice))
