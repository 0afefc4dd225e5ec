"""The file at an address of this process and its identity, and the image that lies there.

The driver takes six things at one pointer: a fatbin wrapper, a fatbin, a cubin, PTX text, and
for its linker LTO-IR and host objects. The first bytes tell which one it is.

Fatbin wrapper (``__fatBinC_Wrapper_t`` in CUDA's fatbinary_section.h)::

    u32 magic 0x466243B1   u32 version   u64 pointer to the fatbin   u64 file name or fatbins

In version 2 (relocatable code, linked at build time) the last pointer leads to a list of the
images that were linked. A null pointer ends it. The driver can link again from these images.
"""

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
from pytest_negativa.models.trace import ImageForm, TracedLibrary, TracedState
from pytest_negativa.storage.system import ProcessMemory, System, open_regular

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

_ELF64_MAGIC = b"\x7fELF\x02\x01"
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_PT_NOTE = 4
_MAX_NOTES = 1 << 16
# Bytes. Hashing this much takes about 5 ms.
_MAX_HASHED = 8 << 20
_HASH_STEP = 256 << 10

# Of images.
_WRAPPER = struct.Struct("<IIQQ")
_WRAPPER_MAGIC = 0x466243B1
_FATBIN = struct.Struct("<IHHQ")
_FATBIN_MAGIC = 0xBA55ED50
_ELF_MAGIC = b"\x7fELF"
_SECTION = struct.Struct("<4xI16xQQ24x")  # of Elf64_Shdr: sh_type, sh_offset, sh_size
_NOBITS = 8
_MAX_PRELINKED = 1 << 14
# Larger than any cubin or PTX seen by far (76 MB); hashing must end.
_MAX_SIZE = 1 << 30
_CHUNK = 1 << 22


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


def state_of(path: str) -> TracedState | None:
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


class FoundImage(NamedTuple):
    """The image at an address: at ``place`` in a file, or in memory only, with its hash.

    Neither is known for ``ImageForm.UNKNOWN``.
    """

    form: ImageForm
    place: MappedPlace | None = None
    sha256: str | None = None
    size: int | None = None
    prelinked: tuple[int, ...] = ()


UNKNOWN_IMAGE = FoundImage(ImageForm.UNKNOWN)


class ImageResolver:
    """Recognises images in this process's memory."""

    def __init__(self, memory: ProcessMemory, mappings: Mappings) -> None:
        self._memory = memory
        self._mappings = mappings

    def resolve(self, address: int) -> FoundImage:
        """Find the image at ``address`` that the driver was given to load."""
        data, others = self._unwrap(address)
        found = self.resolve_bare(data)
        if others and found.place is not None:
            return found._replace(prelinked=self._prelinked(others, found.place.file))
        return found

    def locate(self, address: int) -> MappedPlace | None:
        """Where in a file the image at ``address`` lies, whatever its bytes; None: in none."""
        return self._mappings.find(self._unwrap(address)[0])

    def _unwrap(self, address: int) -> tuple[int, int]:
        """Address of the image in a wrapper, and of the list of linked images; 0: there is none."""
        head = self._memory.read(address, _WRAPPER.size)
        if len(head) < _WRAPPER.size or head[:4] != _WRAPPER_MAGIC.to_bytes(4, "little"):
            return address, 0
        _magic, version, data, others = _WRAPPER.unpack(head)
        return data, others if version >= 2 else 0

    def resolve_output(self, address: int, size: int) -> FoundImage:
        """Find an output of the driver's linker."""
        return self._hashed(ImageForm.LINKED, address, size)

    def resolve_bare(self, address: int, size: int | None = None) -> FoundImage:
        """Find an image without a wrapper; inputs of the driver's linker come with their size."""
        head = self._memory.read(address, 64)
        if head[:4] == _FATBIN_MAGIC.to_bytes(4, "little") and len(head) >= _FATBIN.size:
            header_size, content_size = _FATBIN.unpack_from(head)[2:]
            return self._placed(ImageForm.FATBIN, address, header_size + content_size)
        if head.startswith(_ELF_MAGIC) and len(head) == 64:
            return self._placed(ImageForm.CUBIN, address, self._cubin_size(address, head))
        if size is not None:
            return self._resolve_linker_input(address, size)
        text = self._memory.read_string(address, _MAX_SIZE)
        # PTX ISA, 5.1: a module begins with .version; comments may come before it.
        if text is None or b".version" not in text:
            return UNKNOWN_IMAGE
        return self._placed(ImageForm.PTX, address, len(text))

    def _resolve_linker_input(self, address: int, size: int) -> FoundImage:
        data = self._memory.read_exactly(address, size) if size <= _MAX_SIZE else None
        # The size of PTX may count its NUL; without it, it is known from elsewhere.
        text = (data or b"").rstrip(b"\0")
        if b".version" in text and b"\0" not in text:
            return self._placed(ImageForm.PTX, address, len(text))
        return self._placed(ImageForm.LINKED, address, size)

    def _cubin_size(self, address: int, header: bytes) -> int:
        """Bytes of a cubin in memory: up to the end of its last table or section.

        Mostly that is a table. In cubins of TensorRT-LLM the sections come last.
        ``gpucode.scan`` finds the end of a cubin in a file the same way.
        """
        phoff, shoff = struct.unpack_from("<QQ", header, 32)
        phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", header, 54)
        size = max(phoff + phentsize * phnum, shoff + shentsize * shnum)
        if shentsize == _SECTION.size:
            table = self._memory.read_exactly(address + shoff, shentsize * shnum) or b""
            for kind, offset, length in _SECTION.iter_unpack(table):
                if kind != _NOBITS:
                    size = max(size, offset + length)
        return int(size)

    def _placed(self, form: ImageForm, address: int, size: int) -> FoundImage:
        place = self._mappings.find(address)
        if place is not None:
            return FoundImage(form, place=place, size=size)
        return self._hashed(form, address, size)

    def _hashed(self, form: ImageForm, address: int, size: int) -> FoundImage:
        if not 0 < size <= _MAX_SIZE:
            return UNKNOWN_IMAGE
        digest = hashlib.sha256()
        for start in range(0, size, _CHUNK):
            wanted = min(_CHUNK, size - start)
            data = self._memory.read_exactly(address + start, wanted)
            if data is None:
                return UNKNOWN_IMAGE
            digest.update(data)
        return FoundImage(form, sha256=digest.hexdigest(), size=size)

    def _prelinked(self, address: int, file: MappedFile) -> tuple[int, ...]:
        offsets = []
        for index in range(_MAX_PRELINKED):
            data = self._memory.read_exactly(address + 8 * index, 8)
            pointer = int.from_bytes(data or b"", "little")
            if not pointer:
                break
            place = self._mappings.find(pointer)
            if place is not None and place.file == file:
                offsets.append(place.offset)
        return tuple(offsets)


def identify_file_image(path: str) -> FoundImage:
    """The image that a file is, which the driver was told to load by name."""
    try:
        fd = System.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = System.pread(fd, 4, 0)
            file = MappedFile(System.readlink(f"/proc/self/fd/{fd}"), System.fstat(fd).st_ino)
        finally:
            System.close(fd)
    except OSError:
        return UNKNOWN_IMAGE
    magics = {
        _FATBIN_MAGIC.to_bytes(4, "little"): ImageForm.FATBIN,
        _ELF_MAGIC: ImageForm.CUBIN,
    }
    return FoundImage(magics.get(head, ImageForm.PTX), place=MappedPlace(file, 0))
