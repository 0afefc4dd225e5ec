"""Bare GPU code (cubin, fatbin, PTX, LTO-IR, bitcode), object files, static archives.

Bare code is a file that is a cubin, a fatbin, PTX, LTO-IR, Tile IR or LLVM bitcode from end to
end. Its table is one section without a name. The sections of an archive are those of its members.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_negativa.arch import NO_ARCH, ElementKind, SmArch
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import abi_problem, cubin_arch, is_cubin_header
from pytest_negativa.gpucode.elf import HostElf, HostSection, read_host_elf
from pytest_negativa.gpucode.elf_tables import EHDR, EI_CLASS, EI_DATA, ELFCLASS64, ELFDATA2LSB
from pytest_negativa.gpucode.scan import may_have_containers
from pytest_negativa.gpucode.source import ByteSource, Readable
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.file_kinds import (
    ARCHIVE_MAGIC,
    HEAD_SIZE,
    FileKind,
    kind_of,
    ptx_target,
)
from pytest_negativa.models.library import Compression, Element
from pytest_negativa.models.spans import Span

_ELEMENT_KINDS = {
    FileKind.OBJECT: ElementKind.CUBIN,
    FileKind.CUBIN: ElementKind.CUBIN,
    FileKind.PTX: ElementKind.PTX,
    FileKind.LTO_IR: ElementKind.LTO_IR,
    FileKind.TILE_IR: ElementKind.TILE_IR,
    FileKind.BITCODE: ElementKind.BITCODE,
}
# u16, ten times the arch: 900 for lto_90. Source: files of "nvcc -dlto -ltoir" 13.0 for all archs.
_LTO_ARCH = slice(0x1A, 0x1C)

# Bytes. LLVM's writer puts the target triple at the start of a module, and linkable symbols at its
# end (the symbol table names the triple again).
_SEARCHED_FOR_TRIPLE = 64 << 10
_GPU_TRIPLE = b"nvptx"


def bare_arch(head: bytes) -> SmArch | None:
    """The arch of a file that is a cubin or PTX, by its first bytes; None if they don't tell.

    Args:
        head: the first ``HEAD_SIZE`` bytes.
    """
    if (target := ptx_target(head)) is not None:
        return SmArch.from_number(int(target.rstrip("af")), target.lstrip("0123456789"))
    if kind_of(head) is not FileKind.CUBIN or abi_problem(head) is not None:
        return None
    return cubin_arch(head)


def read_tables(source: ByteSource) -> HostElf:
    """Read identity and sections of any file that may hold GPU code.

    Raises:
        FormatError: of no such kind, or damaged beyond its GPU code; see ``elf.read_host_elf``.
    """
    head = source.read(0, min(HEAD_SIZE, source.size))
    kind = kind_of(head)
    if kind is FileKind.ARCHIVE:
        return _read_archive(source)
    content = _bare_kind(source, head, kind)
    if kind is None or (kind.is_host and content is None):
        return read_host_elf(source)
    sections = (_whole_file(content, 0, source.size),) if content is not None else ()
    return HostElf(
        build_id=None,
        soname=None,
        sections=sections,
        kind=kind,
    )


def _bare_kind(source: ByteSource, head: bytes, kind: FileKind | None) -> FileKind | None:
    """The kind of a file that is GPU code; None for others, such as bitcode for a CPU."""
    if kind is None or kind is FileKind.ARCHIVE:
        return None
    if kind is FileKind.BITCODE:
        return kind if _is_gpu_bitcode(source) else None
    is_code = not kind.is_host or (kind is FileKind.OBJECT and is_cubin_header(head))
    return kind if is_code else None


def _whole_file(kind: FileKind, offset: int, size: int, member: str | None = None) -> HostSection:
    return HostSection("", offset, size, 0, executable=False, content=kind, member=member)


def read_bare_code(source: Readable, section: HostSection) -> Element | None:
    """The code that fills a section from end to end; None for other sections and for fatbins."""
    if section.content is None or (kind := _ELEMENT_KINDS.get(section.content)) is None:
        return None
    head = source.read(section.offset, min(HEAD_SIZE, section.size))
    arch, unreadable = NO_ARCH, None
    if kind is ElementKind.CUBIN and len(head) < EHDR.size:
        unreadable = f"cubin of {len(head)} bytes, expected {EHDR.size} or more"
    elif kind is ElementKind.CUBIN:
        arch, unreadable = cubin_arch(head), abi_problem(head)
    elif kind is ElementKind.LTO_IR:
        arch = SmArch.from_number(int.from_bytes(head[_LTO_ARCH], "little") // 10)
    elif kind is ElementKind.PTX:
        arch = bare_arch(head) or NO_ARCH
    return Element.bare(
        Span(section.offset, section.offset + section.size),
        unpacked_size=section.size,
        arch=arch,
        kind=kind,
        compression=Compression.NONE,
        unreadable=unreadable,
    )


def _is_gpu_bitcode(source: ByteSource) -> bool:
    """Whether the target triple of a module is NVIDIA's: ``nvptx`` or ``nvptx64``."""
    size = min(source.size, _SEARCHED_FOR_TRIPLE)
    ends = source.read(0, size), source.read(source.size - size, size)
    return any(triple in end for end in ends for triple in _encoded_triples())


def _encoded_triples() -> Iterator[bytes]:
    """All encodings of the bytes inside a triple.

    LLVM writes the record MODULE_CODE_TRIPLE without an abbreviation, so each character is a
    variable-width integer in chunks of 6 bits (VBR6), and begins at any bit. The symbol table
    holds plain bytes. Source: LLVM's bitcode format, "Variable Width Integer", "UNABBREV_RECORD".
    """
    yield _GPU_TRIPLE
    bits = 0
    for index, char in enumerate(_GPU_TRIPLE):
        bits |= (char & 31 | 32 | char >> 5 << 6) << 12 * index
    length = 12 * len(_GPU_TRIPLE)
    for skipped in range(8):
        whole = (length - skipped) // 8
        yield (bits >> skipped & (1 << 8 * whole) - 1).to_bytes(whole, "little")


_MEMBER_HEADER = 60
# Bytes. A crafted archive could have many tables of long names, each as large as the file, and
# many members with one name that fills the table.
_MAX_LONG_NAMES = 16 << 20
_MAX_NAME = 4096
_HEADER_END = b"`\n"
# The index of symbols, for 32 and 64 bits, and the table of long names.
_NO_OBJECTS = ("/", "/SYM64/", "//")


def _read_archive(source: ByteSource) -> HostElf:
    sections: list[HostSection] = []
    faults: list[tuple[int, str]] = []
    try:
        for member in iter_members(source):
            window = source.window(member.start, member.size)
            try:
                found = _read_member(source, window, member)
            except FormatError as e:
                faults.append((member.start, f"member {member.name}: {e.problem}"))
                continue
            if found is not None:
                sections.extend(found.sections)
    except FormatError as e:
        faults.append((e.offset or 0, e.problem))
    return HostElf(
        build_id=None,
        soname=None,
        sections=tuple(sections),
        kind=FileKind.ARCHIVE,
        faults=tuple(faults),
    )


def _read_member(source: ByteSource, window: ByteSource, member: Member) -> HostElf | None:
    """The tables of a member with offsets of the archive; None if it is of no known kind."""
    head = window.read(0, min(HEAD_SIZE, window.size))
    kind = kind_of(head)
    content = _bare_kind(window, head, kind)
    if content is not None:
        whole = _whole_file(content, member.start, member.size, member.name)
        return HostElf(None, None, (whole,))
    # CUDA has no other hosts than 64-bit little-endian ones.
    is_host = head[EI_CLASS : EI_DATA + 1] == bytes((ELFCLASS64, ELFDATA2LSB))
    if kind not in (FileKind.LIBRARY, FileKind.OBJECT) or not is_host:
        return None
    host = read_host_elf(window)
    # An object has thousands of small sections, so one search for all is cheaper. The header, which
    # would be found, belongs to none.
    start, end = member.start + EHDR.size, member.start + member.size
    if not may_have_containers(source, start, end, (s.name for s in host.sections)):
        return host._replace(sections=())
    return host._replace(
        sections=tuple(
            section._replace(offset=member.start + section.offset, member=member.name)
            for section in host.sections
        )
    )


def iter_members(source: ByteSource) -> Iterator[Member]:
    """The members of an archive, as GNU's and LLVM's ar make it on Linux.

    Source: ar(5) of FreeBSD for the header; the manual of GNU binutils' bfd, "Archives", for the
    table of long names.

    Raises:
        FormatError: a header leaves the file, or is none.
    """
    position, long_names = len(ARCHIVE_MAGIC), b""
    while position + _MEMBER_HEADER <= source.size:
        header = source.read(position, _MEMBER_HEADER)
        size_text = header[48:58].strip()
        start = position + _MEMBER_HEADER
        if header[58:60] != _HEADER_END or not size_text.isdigit():
            raise FormatError(source.path, position, "no header of an archive's member")
        size = int(size_text)
        if start + size > source.size:
            raise FormatError(
                source.path,
                position,
                f"an archive's member ends at {start + size:#x}, the file at {source.size:#x}",
            )
        # Members begin at even offsets.
        position = start + size + (size & 1)
        name = header[:16].rstrip()
        if name == b"//":
            long_names = source.read(start, min(size, _MAX_LONG_NAMES))
        elif name[:1] == b"/" and name[1:].isdigit():
            at = int(name[1:])
            name = long_names[at : at + _MAX_NAME].split(b"\n", 1)[0]
        shown = (name.removesuffix(b"/") or name).decode("utf-8", "backslashreplace")
        if shown not in _NO_OBJECTS:
            yield Member(archive=source.path, name=shown, size=size, start=start, packed_size=size)
