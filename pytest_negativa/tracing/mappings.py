"""Which file lies at an address of this process, and what file that is."""

from __future__ import annotations

import bisect
import ctypes
import os
import re
import struct
from typing import NamedTuple

from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.storage.system import System

# proc(5), /proc/pid/maps: address perms offset dev inode pathname. Only lines with a path.
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (..)(.)\S ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)
_OCTAL = re.compile(r"\\([0-7]{3})")
_DELETED = " (deleted)"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)")

_ELF_MAGIC = b"\x7fELF\x02\x01"
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_NOTE_HEADER = struct.Struct("<III")
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_MAX_NOTES = 1 << 16


class Mapping(NamedTuple):
    """A part of a file at an address; ``executable`` tells of this part."""

    start: int
    end: int
    offset: int
    path: str
    executable: bool


class MappedPlace(NamedTuple):
    """An address as a file offset."""

    path: str
    offset: int


def parse_maps(data: bytes) -> tuple[Mapping, ...]:
    """The file mappings of a ``/proc/<pid>/maps``, by address."""
    mappings = []
    names: dict[bytes, str] = {}
    for start, end, _rw, x, offset, raw in _LINE.findall(data):
        path = names.get(raw)
        if path is None:
            path = _OCTAL.sub(lambda m: chr(int(m[1], 8)), os.fsdecode(raw))
            names[raw] = path
        mappings.append(Mapping(int(start, 16), int(end, 16), int(offset, 16), path, x == b"x"))
    return tuple(mappings)


class _DlPhdrInfo(ctypes.Structure):
    # dl_iterate_phdr(3)
    _fields_ = [
        ("addr", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("phdr", ctypes.c_void_p),
        ("phnum", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),
        ("subs", ctypes.c_ulonglong),
    ]


class LoaderGeneration:
    """Changes whenever a shared object comes or goes; a microsecond instead of a scan."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: with CDLL the callback below would wait for it under the
        # loader's lock, for which another thread may wait with the GIL.
        libc = ctypes.PyDLL(None)
        self._iterate = getattr(libc, "dl_iterate_phdr", None)
        self._seen = (0, 0)
        kind = ctypes.PYFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(_DlPhdrInfo), ctypes.c_size_t, ctypes.c_void_p
        )
        self._callback = kind(self._note)

    def _note(self, info: ctypes._Pointer[_DlPhdrInfo], _size: int, _data: object) -> int:
        self._seen = (info.contents.adds, info.contents.subs)
        return 1  # one object is enough, the counters are the same for all

    def read(self) -> tuple[int, int]:
        if self._iterate is not None:
            self._iterate(self._callback, None)
        return self._seen


class Mappings:
    """The file mappings of this process, read again when they may have changed."""

    def __init__(self) -> None:
        self._generation = LoaderGeneration()
        self._read_at: tuple[int, int] | None = None
        self._mappings: tuple[Mapping, ...] = ()
        self._starts: list[int] = []
        self._loaded: frozenset[str] = frozenset()
        self._listed_at: tuple[int, int] | None = None

    def find(self, address: int) -> MappedPlace | None:
        """The file and offset at an address; None: no file lies there.

        What the dynamic loader mapped stays until its counters change. Any other mapping may
        have gone meanwhile (a cubin file that a program maps itself), so it is looked up anew.
        """
        if self._generation.read() == self._read_at:
            found = self._find(address)
            if found is not None and found.path in self._loaded:
                return MappedPlace(found.path, found.offset + address - found.start)
        self.refresh()
        found = self._find(address)
        if found is None:
            return None
        return MappedPlace(found.path, found.offset + address - found.start)

    def _find(self, address: int) -> Mapping | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._mappings[index].end:
            return self._mappings[index]
        return None

    def refresh(self) -> None:
        generation = self._generation.read()
        try:
            data = System.read_all("/proc/self/maps")
        except OSError:
            return
        self._mappings = parse_maps(data)
        self._starts = [m.start for m in self._mappings]
        self._loaded = frozenset(m.path for m in self._mappings if m.executable)
        self._read_at = generation

    def new_libraries(self) -> frozenset[str]:
        """Files with code among the mappings; empty if nothing changed since the last call."""
        generation = self._generation.read()
        if generation == self._listed_at:
            return frozenset()
        if generation != self._read_at:
            self.refresh()
        self._listed_at = self._read_at
        return self._loaded

    def libraries(self) -> frozenset[str]:
        """Files with code among the mappings, as of the last look."""
        return self._loaded


def loaded_cupti() -> str | None:
    """The file of the CUPTI that is loaded in this process."""
    mappings = Mappings()
    mappings.refresh()
    for path in sorted(mappings.libraries()):
        if path.rpartition("/")[2].startswith("libcupti.so"):
            return path
    return None


def identify_library(path: str) -> TracedLibrary:
    """What file a mapping shows. A file that is gone has only its path."""
    gone = path.endswith(_DELETED)
    path = path.removesuffix(_DELETED)
    match = _PACKAGES.fullmatch(path)
    package_path = match[1] if match else None
    if gone:
        return TracedLibrary(path=path, package_path=package_path)
    try:
        status = System.stat(path)
        build_id = _read_build_id(path)
    except OSError:
        return TracedLibrary(path=path, package_path=package_path)
    return TracedLibrary(
        path=path,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        build_id=build_id,
        package_path=package_path,
    )


def _read_build_id(path: str) -> str | None:
    # Not gpucode's reader: importing pyelftools takes longer than tracing should to start, and
    # the notes are found here by program headers, which a running library has for certain.
    fd = System.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = System.pread(fd, 64, 0)
        if len(header) < 64 or not header.startswith(_ELF_MAGIC):
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
                build_id = _find_build_id(notes)
                if build_id is not None:
                    return build_id
        return None
    finally:
        System.close(fd)


def _find_build_id(notes: bytes) -> str | None:
    position = 0
    while position + _NOTE_HEADER.size <= len(notes):
        name_size, size, kind = _NOTE_HEADER.unpack_from(notes, position)
        name = position + _NOTE_HEADER.size
        start = name + (name_size + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[name : name + name_size] == b"GNU\0":
            return notes[start : start + size].hex() or None
        position = start + (size + 3 & ~3)
    return None
