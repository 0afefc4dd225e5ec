"""File mappings of a process (``/proc/PID/maps``): the file at an address, deleted files."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.storage.system import System

# proc(5), /proc/pid/maps: address perms offset dev inode pathname. Only lines with a path.
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (..)(.)\S ([0-9a-f]+) (\S+) (\d+) +(/.*)$", re.MULTILINE
)
# Names that the kernel gives to memory without a file: shared mappings, System V segments and huge
# pages (mm/shmem.c, mm/memfd.c, ipc/shm.c, mm/hugetlb.c), and private mappings of /dev/zero.
_MEMORY = re.compile(
    r"/dev/zero|(/dev/zero|/anon_hugepage|/SYSV.*|/memfd:.*) \(deleted\)", re.DOTALL
)
DELETED = " (deleted)"
"""Ends the path of a mapping if its file has no name any more, see proc_pid_maps(5)."""


class MappedFile(NamedTuple):
    """A file as the kernel names it: ``path`` ends with " (deleted)" if it has no name any more.

    The inode is only for comparing one mapping with another. On overlayfs it need not be that of
    ``stat``, and neither is the device.
    """

    path: str
    inode: int


class Mapping(NamedTuple):
    """A part of a file at an address; ``executable`` tells of this part.

    ``device`` is as the kernel writes it: major and minor number in hex.
    """

    start: int
    end: int
    offset: int
    file: MappedFile
    executable: bool
    device: str


class MappedPlace(NamedTuple):
    """An address as a file offset."""

    file: MappedFile
    offset: int


def parse_maps(data: bytes) -> tuple[Mapping, ...]:
    """The file mappings of a ``/proc/<pid>/maps``, by address."""
    mappings = []
    names: dict[bytes, str] = {}
    for start, end, _rw, x, offset, device, inode, raw in _LINE.findall(data):
        path = names.get(raw)
        if path is None:
            # The kernel writes nothing else so (show_map_vma in fs/proc/task_mmu.c).
            path = names[raw] = os.fsdecode(raw).replace("\\012", "\n")
        place = int(start, 16), int(end, 16), int(offset, 16)
        file = MappedFile(path, int(inode))
        mappings.append(Mapping(*place, file, x == b"x", device.decode("ascii")))
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
        index = bisect.bisect_right(self._starts, address) - 1
        found = self._mappings[index] if index >= 0 else None
        if found is None or address >= found.end:
            found = _find_line(System.read_all("/proc/self/maps"), address)
            # A library may lie in a memfd. Other memory holds images as the heap does.
            is_loaded = found is not None and found.file in self._loaded
            if found is None or (not is_loaded and _MEMORY.fullmatch(found.file.path)):
                return None
        return MappedPlace(found.file, found.offset + address - found.start)

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
