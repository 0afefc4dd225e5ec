"""The identity of a traced library: path below site-packages, state, build id, else SHA-256."""

from __future__ import annotations

import contextlib
import os
import re
import struct

from msgspec.structs import asdict, replace

from pytest_negativa.models.build_id import find_build_id
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.storage.system import System, hash_steps, open_regular
from pytest_negativa.tracing.mappings import DELETED, MappedFile

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)")
_ELF64_MAGIC = ELF_MAGIC + b"\x02\x01"
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_PT_NOTE = 4
_MAX_NOTES = 1 << 16
# Bytes. Hashing this much takes about 5 ms.
_MAX_HASHED = 8 << 20


def identify_library(path: str) -> TracedLibrary:
    """Identity of the file at a path. If it can't be read, only its path is known.

    A file without a build id is hashed if it is small: if it goes before the run ends, nothing else
    tells what it was.
    """
    match = _PACKAGES.fullmatch(path)
    library = TracedLibrary(path=path, package_path=match[1] if match else None)
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
        fd = System.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return library
    try:
        status = System.fstat(fd)
        build_id = _read_build_id(fd)
        hashed = build_id is None and status.st_size <= _MAX_HASHED
        return replace(
            library,
            **asdict(FileState.of(status)),
            build_id=build_id,
            sha256=_hash(fd, status.st_size) if hashed else None,
        )
    except OSError:
        return library
    finally:
        System.close(fd)


def state_of(path: str) -> FileState | None:
    """The state of the file at a path; None if none is there."""
    try:
        return FileState.of(System.stat(path))
    except OSError:
        return None


def hash_library(library: TracedLibrary) -> TracedLibrary:
    """The library with the digest of its file, if no process changed the file since it was seen."""
    state = library.state
    if library.sha256 is not None or state is None or state_of(library.path) != state:
        return library
    with contextlib.suppress(OSError), open_regular(library.path) as file:
        sha256 = _hash(file.fileno(), os.fstat(file.fileno()).st_size)
        if state_of(library.path) == state:
            return replace(library, sha256=sha256)
    return library


def split_deleted(file: MappedFile) -> tuple[str, bool]:
    """The path of a mapped file, and whether it is gone from there.

    A file may have " (deleted)" in its own name.
    """
    if not file.path.endswith(DELETED):
        return file.path, False
    state = state_of(file.path)
    if state is not None and state.inode == file.inode:
        return file.path, False
    return file.path.removesuffix(DELETED), True


def _hash(fd: int, size: int) -> str | None:
    """SHA-256 of an open file; None if it is shorter than it was."""
    return hash_steps(lambda offset, length: System.pread(fd, length, offset), size)


def _read_build_id(fd: int) -> str | None:
    # Not gpucode's reader, which goes by section headers. A running library has program headers for
    # certain.
    header = System.pread(fd, 64, 0)
    if len(header) < 64 or not header.startswith(_ELF64_MAGIC):
        return None
    table, size, count = (
        int.from_bytes(header[32:40], "little"),
        int.from_bytes(header[54:56], "little"),
        int.from_bytes(header[56:58], "little"),
    )
    if size != _PROGRAM_HEADER.size or table >= 1 << 62:
        return None
    data = System.pread(fd, size * count, table)
    rows = _PROGRAM_HEADER.iter_unpack(data[: len(data) // size * size])
    for kind, _flags, offset, _vaddr, _paddr, file_size, *_ in rows:
        if kind == _PT_NOTE and offset < 1 << 62:
            notes = System.pread(fd, min(file_size, _MAX_NOTES), offset)
            build_id = find_build_id(notes)
            if build_id is not None:
                return build_id
    return None
