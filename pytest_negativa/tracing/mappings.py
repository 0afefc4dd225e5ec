"""The file at an address of this process, and its identity."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import hashlib
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.models.build_id import find_build_id
from pytest_negativa.models.trace import FileState, TracedLibrary
from pytest_negativa.storage.system import System, open_regular

# proc(5), /proc/pid/maps: address perms offset dev inode pathname. Only lines with a path.
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (..)(.)\S ([0-9a-f]+) \S+ (\d+) +(/.*)$", re.MULTILINE
)
# Names that the kernel gives to memory without a file: shared mappings, System V segments and huge
# pages (mm/shmem.c, mm/memfd.c, ipc/shm.c, mm/hugetlb.c), and private mappings of /dev/zero.
_MEMORY = re.compile(
    r"/dev/zero|(/dev/zero|/anon_hugepage|/SYSV.*|/memfd:.*) \(deleted\)", re.DOTALL
)
_OCTAL = re.compile(r"\\([0-7]{3})")
_DELETED = " (deleted)"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)")

_ELF_MAGIC = b"\x7fELF\x02\x01"
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_PT_NOTE = 4
_MAX_NOTES = 1 << 16
# Bytes. Hashing this much takes about 5 ms.
_MAX_HASHED = 8 << 20
_HASH_STEP = 256 << 10


class MappedFile(NamedTuple):
    """A file as the kernel names it: ``path`` ends with " (deleted)" if it has no name any more.

    The inode is only for comparing one mapping with another. On overlayfs it need not be that of
    ``stat``, and neither is the device.
    """

    path: str
    inode: int


class Mapping(NamedTuple):
    """A part of a file at an address; ``executable`` tells of this part."""

    start: int
    end: int
    offset: int
    file: MappedFile
    executable: bool


class MappedPlace(NamedTuple):
    """An address as a file offset."""

    file: MappedFile
    offset: int


def parse_maps(data: bytes) -> tuple[Mapping, ...]:
    """The file mappings of a ``/proc/<pid>/maps``, by address."""
    mappings = []
    names: dict[bytes, str] = {}
    for start, end, _rw, x, offset, inode, raw in _LINE.findall(data):
        path = names.get(raw)
        if path is None:
            path = _OCTAL.sub(lambda m: chr(int(m[1], 8)), os.fsdecode(raw))
            names[raw] = path
        place = int(start, 16), int(end, 16), int(offset, 16)
        mappings.append(Mapping(*place, MappedFile(path, int(inode)), x == b"x"))
    return tuple(mappings)


def _find_line(maps: bytes, address: int) -> Mapping | None:
    """The file mapping at an address, found by bisection: lines are sorted by address."""
    low, high = 0, len(maps)
    while low < high:
        middle = maps.rfind(b"\n", low, (low + high) // 2) + 1 or low
        end = maps.find(b"\n", middle, high) + 1 or high
        start, _, behind = maps[middle:end].partition(b" ")[0].partition(b"-")
        if address < int(start, 16):
            high = middle
        elif address >= int(behind, 16):
            low = end
        else:
            return next(iter(parse_maps(maps[middle:end])), None)
    return None


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
        self._loaded: frozenset[MappedFile] = frozenset()
        self._listed_at: tuple[int, int] | None = None

    def find(self, address: int) -> MappedPlace | None:
        """The file and offset at an address; None: no file lies there.

        What the dynamic loader mapped stays until its counters change. Any other mapping may
        have gone meanwhile (a cubin file that a program maps itself), so it is looked up anew. That
        parses one line: a compiler that tries hundreds of kernels hands them over in memory, in a
        process of 20,000 mappings.

        Raises:
            OSError: see ``refresh``.
        """
        if self._generation.read() != self._read_at:
            self.refresh()
        found = self._find(address)
        if found is None or found.file not in self._loaded:
            found = _find_line(System.read_all("/proc/self/maps"), address)
            # A library may lie in a memfd. Other memory holds images as the heap does.
            is_loaded = found is not None and found.file in self._loaded
            if found is None or (not is_loaded and _MEMORY.fullmatch(found.file.path)):
                return None
        return MappedPlace(found.file, found.offset + address - found.start)

    def _find(self, address: int) -> Mapping | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._mappings[index].end:
            return self._mappings[index]
        return None

    def refresh(self) -> None:
        """Read the mappings.

        Raises:
            OSError: they can't be read, as after a ``chroot`` to a folder without ``/proc``.
        """
        generation = self._generation.read()
        found = parse_maps(System.read_all("/proc/self/maps"))
        self._loaded = frozenset(m.file for m in found if m.executable)
        self._mappings = tuple(m for m in found if m.file in self._loaded)
        self._starts = [m.start for m in self._mappings]
        self._read_at = generation

    def new_libraries(self) -> frozenset[MappedFile]:
        """Files with code among the mappings; empty if nothing changed since the last call."""
        generation = self._generation.read()
        if generation == self._listed_at:
            return frozenset()
        if generation != self._read_at:
            with contextlib.suppress(OSError):
                self.refresh()
        self._listed_at = self._read_at
        return self._loaded

    def libraries(self) -> frozenset[str]:
        """Paths of the files with code among the mappings, as of the last look."""
        return frozenset(file.path for file in self._loaded)


def loaded_cupti() -> str | None:
    """The file of the CUPTI that is loaded in this process."""
    mappings = Mappings()
    mappings.refresh()
    files = (path for path in mappings.libraries() if Path(path).name.startswith("libcupti.so"))
    return min(files, default=None)


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
        return TracedLibrary(
            path=path,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            build_id=build_id,
            package_path=library.package_path,
            device=status.st_dev,
            inode=status.st_ino,
            ctime_ns=status.st_ctime_ns,
            sha256=_hash(fd, status.st_size) if hashed else None,
        )
    except OSError:
        return library
    finally:
        System.close(fd)


def state_of(path: str) -> FileState | None:
    """The state of the file at a path; None if none is there."""
    try:
        status = System.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_library(library: TracedLibrary) -> TracedLibrary:
    """The library with the digest of its file, if no process changed the file since it was seen."""
    if library.sha256 is not None or state_of(library.path) != library.state:
        return library
    with contextlib.suppress(OSError), open_regular(library.path) as file:
        sha256 = _hash(file.fileno(), os.fstat(file.fileno()).st_size)
        if state_of(library.path) == library.state:
            return replace(library, sha256=sha256)
    return library


def split_deleted(file: MappedFile) -> tuple[str, bool]:
    """The path of a mapped file, and whether it is gone from there.

    A file may have " (deleted)" in its own name.
    """
    if not file.path.endswith(_DELETED):
        return file.path, False
    state = state_of(file.path)
    if state is not None and state[1] == file.inode:
        return file.path, False
    return file.path.removesuffix(_DELETED), True


def _hash(fd: int, size: int) -> str | None:
    """SHA-256 of an open file; None if it is shorter than it was."""
    digest = hashlib.sha256()
    for offset in range(0, size, _HASH_STEP):
        data = System.pread(fd, min(_HASH_STEP, size - offset), offset)
        if not data:
            return None
        digest.update(data)
    return digest.hexdigest()


def _read_build_id(fd: int) -> str | None:
    # Not gpucode's reader, which goes by section headers. A running library has program headers for
    # certain.
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
            build_id = find_build_id(notes)
            if build_id is not None:
                return build_id
    return None
