"""Kinds of files with GPU code, by first bytes and name; which are for linkers; spares."""

from __future__ import annotations

import enum
import re


class FileKind(str, enum.Enum):
    """Kind of a file with GPU code.

    ``LIBRARY`` is a shared library or program, ``OBJECT`` a relocatable ELF file for the CPU or the
    GPU, ``ARCHIVE`` a static one of objects. ``FILES`` are all files of a distribution that are GPU
    code, as one library. The others are GPU code themselves.
    """

    LIBRARY = "library"
    OBJECT = "object"
    ARCHIVE = "archive"
    CUBIN = "cubin"
    FATBIN = "fatbin"
    PTX = "ptx"
    LTO_IR = "lto-ir"
    BITCODE = "bitcode"
    TILE_IR = "tile-ir"
    FILES = "files"

    @property
    def described(self) -> str:
        """A noun for messages."""
        return _DESCRIBED[self]

    @property
    def is_host(self) -> bool:
        """Whether the file holds the GPU code in sections of host ELF files."""
        return self in (FileKind.LIBRARY, FileKind.OBJECT, FileKind.ARCHIVE)

    @property
    def is_link_time(self) -> bool:
        """Whether only a linker reads the file, so that no device loads its code as it is."""
        return self in (FileKind.OBJECT, FileKind.BITCODE, FileKind.ARCHIVE)


_DESCRIBED = {
    FileKind.LIBRARY: "a library or program",
    FileKind.OBJECT: "an object file",
    FileKind.ARCHIVE: "a static archive",
    FileKind.CUBIN: "a bare cubin",
    FileKind.FATBIN: "a bare fatbin",
    FileKind.PTX: "PTX",
    FileKind.LTO_IR: "LTO-IR",
    FileKind.BITCODE: "LLVM bitcode",
    FileKind.TILE_IR: "Tile IR",
    FileKind.FILES: "files that are GPU code",
}

CODE_SUFFIXES = (".cubin", ".fatbin", ".ptx")
"""Names of files that a driver loads as they are end so, by convention."""

LOADABLE = frozenset({FileKind.CUBIN, FileKind.FATBIN, FileKind.PTX})
"""Kinds of GPU code that the driver loads without a library around it."""

# spare/note.py
_SPARE = re.compile(r".+\.[0-9a-f]{16}\.spare", re.DOTALL)


def is_spare(name: str) -> bool:
    """Whether a file of this name is a spare, which begins like a library, and has its tables."""
    return _SPARE.fullmatch(name) is not None


def is_named_code(path: str) -> bool:
    """Whether a file is a library, or GPU code itself, by its name alone."""
    name = path.rpartition("/")[2]
    return ".so" in name or name.endswith(CODE_SUFFIXES)


HEAD_SIZE = 4096
"""Bytes at the start of a file that ``kind_of`` needs; fewer if the file is smaller."""

ARCHIVE_MAGIC = b"!<arch>\n"

# By first bytes. The fatbin's is gpucode.fatbin.MAGIC. LTO-IR: files of "nvcc -dlto -ltoir" 13.0.
# Tile IR: "Tile IR bytecode", section "Magic number", of NVIDIA's specification; nvFatbin 13.5
# checks it. Bitcode: LLVM's bitcode format, "Magic Numbers" and "Bitcode Wrapper Format".
_MAGIC_NUMBERS = (
    (b"\x50\xed\x55\xba", FileKind.FATBIN),
    (b"\xed\x43\x4e\x7f", FileKind.LTO_IR),
    (b"\x7fTileIR\0", FileKind.TILE_IR),
    (b"BC\xc0\xde", FileKind.BITCODE),
    (b"\xde\xc0\x17\x0b", FileKind.BITCODE),
    (ARCHIVE_MAGIC, FileKind.ARCHIVE),
)

ELF_MAGIC = b"\x7fELF"
_E_TYPE, _E_MACHINE = slice(16, 18), slice(18, 20)
_ET_REL = b"\x01\0"
_EM_CUDA = b"\xbe\0"

# PTX ISA, "PTX Module Directives": .version comes first and .target second; comments may precede.
_PTX = re.compile(
    rb"^[ \t]*\.version[ \t]+\d+\.\d+\s(?:.*\n)*?[ \t]*\.target[ \t]+[a-z]+_(\d{1,4}[af]?)\b",
    re.MULTILINE,
)
_TEXT_STARTS = (b"//", b"/*", b".version")


def kind_of(head: bytes) -> FileKind | None:
    """The kind of a file by its first ``HEAD_SIZE`` bytes; None: no known kind of GPU code."""
    if head.startswith(ELF_MAGIC):
        if head[_E_TYPE] == _ET_REL:
            return FileKind.OBJECT
        return FileKind.CUBIN if head[_E_MACHINE] == _EM_CUDA else FileKind.LIBRARY
    for magic, kind in _MAGIC_NUMBERS:
        if head.startswith(magic):
            return kind
    return None if ptx_target(head) is None else FileKind.PTX


def is_loadable(head: bytes) -> bool:
    """Whether a file is GPU code that a driver loads as it is, by its first ``HEAD_SIZE`` bytes.

    LTO-IR, Tile IR and bitcode pass through a compiler. Its cache may hide that a program needs
    them, so they are not among these files.
    """
    return kind_of(head) in LOADABLE


def ptx_target(head: bytes) -> str | None:
    """The arch in the ``.target`` line of PTX, such as ``90a``; None for other text or data."""
    if not head.lstrip()[:8].startswith(_TEXT_STARTS) or (found := _PTX.search(head)) is None:
        return None
    return found[1].decode()
