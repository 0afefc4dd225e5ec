"""The image that the driver was given: its form, and where it lies in a file or its digest.

The driver takes six things at one pointer: a fatbin wrapper, a fatbin, a cubin, PTX text, and
for its linker LTO-IR and host objects. The first bytes tell which one it is.

Fatbin wrapper (``__fatBinC_Wrapper_t`` in CUDA's fatbinary_section.h)::

    u32 magic 0x466243B1   u32 version   u64 pointer to the fatbin   u64 file name or fatbins

In version 2 (relocatable code, linked at build time) the last pointer leads to a list of the
images that were linked. A null pointer ends it. The driver can link again from these images.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.trace import ImageForm
from pytest_negativa.storage.system import ProcessMemory, System, hash_steps
from pytest_negativa.tracing.mappings import MappedFile, MappedPlace, Mappings

_WRAPPER = struct.Struct("<IIQQ")
_WRAPPER_MAGIC = (0x466243B1).to_bytes(4, "little")
_FATBIN = struct.Struct("<IHHQ")
_FATBIN_MAGIC = (0xBA55ED50).to_bytes(4, "little")
_SECTION = struct.Struct("<4xI16xQQ24x")  # of Elf64_Shdr: sh_type, sh_offset, sh_size
_NOBITS = 8
_MAX_PRELINKED = 1 << 14
# Larger than any cubin or PTX seen by far (76 MB); hashing must end.
_MAX_SIZE = 1 << 30


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
        if len(head) < _WRAPPER.size or head[:4] != _WRAPPER_MAGIC:
            return address, 0
        _magic, version, data, others = _WRAPPER.unpack(head)
        return data, others if version >= 2 else 0

    def resolve_bare(self, address: int, size: int | None = None) -> FoundImage:
        """Find an image without a wrapper; inputs of the driver's linker come with their size."""
        head = self._memory.read(address, 64)
        if head[:4] == _FATBIN_MAGIC and len(head) >= _FATBIN.size:
            header_size, content_size = _FATBIN.unpack_from(head)[2:]
            return self._placed(ImageForm.FATBIN, address, header_size + content_size)
        if head.startswith(ELF_MAGIC) and len(head) == 64:
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
        return self.hashed(form, address, size)

    def hashed(self, form: ImageForm, address: int, size: int) -> FoundImage:
        """The image at an address by its digest, such as an output of the driver's linker."""
        if not 0 < size <= _MAX_SIZE:
            return UNKNOWN_IMAGE
        sha256 = hash_steps(
            lambda offset, length: self._memory.read_exactly(address + offset, length), size
        )
        return UNKNOWN_IMAGE if sha256 is None else FoundImage(form, sha256=sha256, size=size)

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
    forms = {_FATBIN_MAGIC: ImageForm.FATBIN, ELF_MAGIC: ImageForm.CUBIN}
    return FoundImage(forms.get(head, ImageForm.PTX), place=MappedPlace(file, 0))
