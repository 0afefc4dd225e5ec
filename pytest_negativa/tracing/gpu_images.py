"""An address that was handed to the driver, to what lies there.

The driver takes six things at one pointer: a fatbin wrapper, a fatbin, a cubin, PTX text, and
for its linker LTO-IR and host objects. The first bytes tell which one it is.

Fatbin wrapper (``__fatBinC_Wrapper_t`` in CUDA's fatbinary_section.h)::

    u32 magic 0x466243B1   u32 version   u64 pointer to the fatbin   u64 file name or fatbins

In version 2 (relocatable code, linked at build time) the last pointer leads to a list of the
images that were linked. A null pointer ends it. The driver can link again from these images.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import NamedTuple

from pytest_negativa.models.trace import ImageForm
from pytest_negativa.storage.system import ProcessMemory, System
from pytest_negativa.tracing.mappings import MappedFile, MappedPlace, Mappings

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
        head = self._memory.read(address, _WRAPPER.size)
        if head[:4] != _WRAPPER_MAGIC.to_bytes(4, "little"):
            return self._resolve_bare(address, None)
        if len(head) < _WRAPPER.size:
            return UNKNOWN_IMAGE
        _magic, version, data, others = _WRAPPER.unpack(head)
        found = self._resolve_bare(data, None)
        if version >= 2 and others and found.place is not None:
            return found._replace(prelinked=self._prelinked(others, found.place.file))
        return found

    def locate(self, address: int) -> MappedPlace | None:
        """Where in a file the image at ``address`` lies, whatever its bytes; None: in none."""
        head = self._memory.read(address, _WRAPPER.size)
        if head[:4] == _WRAPPER_MAGIC.to_bytes(4, "little") and len(head) == _WRAPPER.size:
            address = _WRAPPER.unpack(head)[2]
        return self._mappings.find(address)

    def resolve_sized(self, address: int, size: int) -> FoundImage:
        """Find an input of the driver's linker, which comes with its size."""
        return self._resolve_bare(address, size)

    def resolve_output(self, address: int, size: int) -> FoundImage:
        """Find an output of the driver's linker."""
        return self._hashed(ImageForm.LINKED, address, size)

    def _resolve_bare(self, address: int, size: int | None) -> FoundImage:
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
