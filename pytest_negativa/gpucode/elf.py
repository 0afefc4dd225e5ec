"""Host ELF file to its sections and identity; the only user of pyelftools.

pyelftools trusts the counts and offsets of a file. This module checks the header first, limits
what pyelftools reads, and turns every exception that it raises into a ``FormatError``.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from elftools.elf.constants import P_FLAGS, SH_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, Section
from elftools.elf.segments import InterpSegment

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf_tables import (
    EHDR,
    EI_CLASS,
    EI_DATA,
    ELF_MAGIC,
    ELFCLASS64,
    ELFDATA2LSB,
    EM_CUDA,
    SHDR,
    SHN_LORESERVE,
    ElfHeader,
)
from pytest_negativa.gpucode.source import ByteSource, Window
from pytest_negativa.models.file_kinds import HEAD_SIZE, FileKind, kind_of

# gABI: with SHN_LORESERVE sections or more, e_shnum is 0 and section 0 holds the count. No known
# library comes near it, and it would make every look-up here slow.
_MAX_SECTIONS = SHN_LORESERVE
# Bytes that pyelftools may read of one file; each read costs some besides, since the number of
# reads decides the time. An object file of 65,000 sections needs half, libtorch_cuda.so 1%.
_READ_BUDGET = 128 << 20
_READ_COST = 64
# An archive may have thousands of members, so a small file has a small budget. Files of many
# sections need 16 times their size.
_MIN_READ_BUDGET = 1 << 20
_READ_RATIO = 64

_T = TypeVar("_T")


class HostSection(NamedTuple):
    """A section whose bytes lie in the file and are loaded at run time.

    Attributes:
        content: the kind of bytes that are GPU code from end to end; None for a section.
        member: of an archive, the member that holds it.
    """

    name: str
    offset: int
    size: int
    vaddr: int
    executable: bool
    content: FileKind | None = None
    member: str | None = None


class HostSegment(NamedTuple):
    """A program header; ``kind`` is its type's name, such as ``PT_LOAD``."""

    kind: str
    offset: int
    vaddr: int
    file_size: int
    memory_size: int
    alignment: int
    writable: bool
    executable: bool


class HostElf(NamedTuple):
    """The facts about a library apart from its GPU code.

    Attributes:
        machine: name of its ELF machine, e.g. ``EM_X86_64``.
        build_id: hex of the GNU build id, if it has one.
        soname: ``DT_SONAME``, if it has one.
        sections: allocated sections with bytes in the file.
        zeros: allocated sections without; their ``offset`` says nothing.
        segments: the program headers, if they were asked for.
        kind: what the file is.
        faults: why members of an archive can't be read, with their file offsets.
    """

    machine: str
    build_id: str | None
    soname: str | None
    sections: tuple[HostSection, ...]
    zeros: tuple[HostSection, ...] = ()
    segments: tuple[HostSegment, ...] = ()
    kind: FileKind = FileKind.LIBRARY
    faults: tuple[tuple[int, str], ...] = ()


def read_host_elf(source: ByteSource | Window, *, with_segments: bool = False) -> HostElf:
    """Read identity, sections and, if asked for, program headers of a host ELF file.

    Raises:
        FormatError: not an ELF file, not one for a 64-bit little-endian host, without
            section headers, or with tables that leave the file.
    """
    _check_header(source)
    return _guarded(source, lambda elf: _read(elf, source, with_segments))


def read_segments(source: ByteSource) -> tuple[HostSegment, ...]:
    """Read the program headers of a host ELF file, which need not have section headers.

    Raises:
        FormatError: not an ELF file, not one for a 64-bit little-endian host, or with tables that
            leave the file.
    """
    _check_magic(source)
    return _guarded(source, _read_segments)


def _guarded(source: ByteSource | Window, read: Callable[[ELFFile], _T]) -> _T:
    try:
        return read(_ElfFile(_BudgetedReader(source)))
    except FormatError:
        raise
    # pyelftools raises its own errors, but also KeyError, UnicodeDecodeError, struct.error and
    # AttributeError on damaged files. None of them says more than "damaged".
    except Exception as e:
        # Errors of our own stream come back wrapped, maybe twice.
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, FormatError):
                raise cause from None
            cause = cause.__context__
        raise FormatError(source.path, None, f"damaged ELF file: {type(e).__name__}: {e}") from e


def _check_magic(source: ByteSource | Window) -> ElfHeader:
    if source.size == 0:
        raise FormatError(source.path, None, "is empty, expected an ELF file")
    head = source.read(0, min(HEAD_SIZE, source.size))
    if not head.startswith(ELF_MAGIC):
        kind = kind_of(head)
        found = f"it starts with {head[:4].hex()}, not with 7f454c46"
        if kind is not None:
            found = f"it is {kind.described}"
        raise FormatError(source.path, None, f"not an ELF file, as libraries are: {found}")
    if source.size < EHDR.size:
        raise FormatError(
            source.path,
            0,
            f"truncated ELF header: {source.size} bytes, expected {EHDR.size} or more",
        )
    header = EHDR.unpack_from(source.read(0, EHDR.size))
    elf_class, encoding = header.e_ident[EI_CLASS], header.e_ident[EI_DATA]
    if elf_class != ELFCLASS64:
        raise FormatError(
            source.path, 4, f"ELF class {elf_class}, expected 2 (64 bit); CUDA libraries are 64 bit"
        )
    if encoding != ELFDATA2LSB:
        raise FormatError(
            source.path, 5, f"ELF data encoding {encoding}, expected 1 (little endian)"
        )
    if header.e_machine == EM_CUDA:
        raise FormatError(
            source.path, 18, "is a bare cubin (machine EM_CUDA), expected a host library around it"
        )
    return header


def find_interpreter(source: ByteSource) -> tuple[str | None, int]:
    """Find the dynamic loader that an executable asks for (PT_INTERP).

    Returns:
        Its path, or None; and 32 or 64, the bits of the executable.

    Raises:
        FormatError: not an ELF file, or a damaged one.
    """
    if source.size < len(ELF_MAGIC) or source.read(0, len(ELF_MAGIC)) != ELF_MAGIC:
        raise FormatError(source.path, 0, "not an ELF file: it doesn't start with 7f454c46")
    return _guarded(source, _read_interpreter)


def _read_interpreter(elf: ELFFile) -> tuple[str | None, int]:
    names = [s.get_interp_name() for s in elf.iter_segments() if isinstance(s, InterpSegment)]
    return (names[0] if names else None), elf.elfclass


def _check_header(source: ByteSource | Window) -> None:
    header = _check_magic(source)
    start, count = header.e_shoff, header.e_shnum
    if start == 0 or count == 0:
        raise FormatError(
            source.path,
            0x28,
            "has no section headers (stripped by sstrip or a packer?), so nothing tells GPU code "
            "from other data; it is left alone",
        )
    if header.e_shentsize != SHDR.size:
        raise FormatError(
            source.path, 0x3A, f"e_shentsize {header.e_shentsize}, expected {SHDR.size}"
        )
    if count >= _MAX_SECTIONS or header.e_shstrndx >= count:
        raise FormatError(
            source.path,
            0x3C,
            f"e_shnum {count} and e_shstrndx {header.e_shstrndx} do not fit together",
        )
    end = start + count * SHDR.size
    if end > source.size:
        raise FormatError(
            source.path,
            start,
            f"section headers end at {end:#x}, past the end of the file at {source.size:#x}; "
            "is it truncated?",
        )


def _read(elf: ELFFile, source: ByteSource | Window, with_segments: bool) -> HostElf:
    sections: list[HostSection] = []
    zeros: list[HostSection] = []
    build_id = soname = None
    for section in elf.iter_sections():
        header = section.header
        if header["sh_type"] == "SHT_NOBITS":
            # Thread-local zeros take no address of the library (gABI, chapter 4, SHF_TLS).
            if header["sh_flags"] & (SH_FLAGS.SHF_ALLOC | SH_FLAGS.SHF_TLS) == SH_FLAGS.SHF_ALLOC:
                zeros.append(_host_section(section))
            continue
        if header["sh_type"] == "SHT_NULL":
            continue
        offset, size = header["sh_offset"], header["sh_size"]
        if isinstance(section, NoteSection):
            build_id = build_id or _find_build_id(section)
        elif isinstance(section, DynamicSection):
            soname = soname or _find_soname(section)
        if not header["sh_flags"] & SH_FLAGS.SHF_ALLOC:
            continue
        if offset + size > source.size:
            raise FormatError(
                source.path,
                offset,
                f"section {section.name} ends at {offset + size:#x}, past the end of the file at "
                f"{source.size:#x}; is it truncated?",
            )
        sections.append(_host_section(section))
    _check_overlap(source, sections)
    return HostElf(
        machine=str(elf["e_machine"]),
        build_id=build_id,
        soname=soname,
        sections=tuple(sections),
        zeros=tuple(zeros),
        segments=_read_segments(elf) if with_segments else (),
        kind=FileKind.OBJECT if elf["e_type"] == "ET_REL" else FileKind.LIBRARY,
    )


def _host_section(section: Section) -> HostSection:
    header = section.header
    return HostSection(
        name=section.name,
        offset=header["sh_offset"],
        size=header["sh_size"],
        vaddr=header["sh_addr"],
        executable=bool(header["sh_flags"] & SH_FLAGS.SHF_EXECINSTR),
    )


def _read_segments(elf: ELFFile) -> tuple[HostSegment, ...]:
    return tuple(
        HostSegment(
            kind=str(header["p_type"]),
            offset=header["p_offset"],
            vaddr=header["p_vaddr"],
            file_size=header["p_filesz"],
            memory_size=header["p_memsz"],
            alignment=header["p_align"],
            writable=bool(header["p_flags"] & P_FLAGS.PF_W),
            executable=bool(header["p_flags"] & P_FLAGS.PF_X),
        )
        for header in (segment.header for segment in elf.iter_segments())
    )


def _check_overlap(source: ByteSource | Window, sections: list[HostSection]) -> None:
    # Sound sections never share bytes. Crafted ones could have the file searched 65,000 times.
    filled = sorted((s for s in sections if s.size), key=lambda s: s.offset)
    for before, after in itertools.pairwise(filled):
        if before.offset + before.size > after.offset:
            raise FormatError(
                source.path,
                after.offset,
                f"section {after.name} overlaps section {before.name}, which ends at "
                f"{before.offset + before.size:#x}; crafted or damaged",
            )


def _find_build_id(section: NoteSection) -> str | None:
    for note in section.iter_notes():
        if note["n_type"] == "NT_GNU_BUILD_ID" and note["n_name"] == "GNU":
            return str(note["n_desc"])
    return None


def _find_soname(section: DynamicSection) -> str | None:
    for tag in section.iter_tags("DT_SONAME"):
        return str(tag.soname)  # type: ignore[attr-defined]
    return None


class _ElfFile(ELFFile):
    """Leaves hash tables of symbols unread: pyelftools would unpack each number of them."""

    def _make_elf_hash_section(self, section_header: Any, name: str) -> Any:
        return Section(section_header, name, self)

    _make_gnu_hash_section = _make_elf_hash_section


class _BudgetedReader(io.BufferedReader):
    """A stream for pyelftools, until the budget is spent.

    Tables of a crafted file can name the same bytes again and again, such as a string of
    megabytes for each of 65,000 sections.
    """

    def __init__(self, source: ByteSource | Window) -> None:
        super().__init__(_SourceStream(source))
        self._path = source.path
        self._left = min(_READ_BUDGET, _MIN_READ_BUDGET + source.size * _READ_RATIO)

    def read(self, size: int | None = -1) -> bytes:
        self._left -= _READ_COST + (size if size is not None and size >= 0 else _READ_BUDGET)
        if self._left < 0:
            raise FormatError(
                self._path,
                None,
                "the ELF tables take too much reading, as if they overlapped; crafted or damaged",
            )
        return super().read(size)


class _SourceStream(io.RawIOBase):
    """A seekable stream over a ``ByteSource``, for pyelftools."""

    def __init__(self, source: ByteSource | Window) -> None:
        self._source = source
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._source.size)[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), max(self._source.size - self._position, 0))
        buffer[:length] = self._source.read(self._position, length)
        self._position += length
        return length
