"""Builds host ELF files, regions, elements, cubins and zstd frames, sound or broken.

Every field that a sound file derives from others (a size, an offset, a count) can be given
instead, which is how a test states the lie that it is about. Shares no code with the package:
the layouts are written down here a second time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import lz4.block
import zstandard

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
PAIR = struct.Struct("<II")
REGION_HEADER = struct.Struct("<IHHQ")
ELEMENT_HEADER = struct.Struct("<HHIQIIHHIIIQQQ")
DYNAMIC_TAG = struct.Struct("<QQ")

SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_DYNAMIC, SHT_NOTE, SHT_NOBITS = 1, 2, 3, 6, 7, 8
SHT_CUDA_CALLGRAPH = 0x70000001
SHF_ALLOC, SHF_EXECINSTR = 2, 4
EM_CUDA, EM_X86_64 = 190, 62

PTX, CUBIN, LTO_IR = 1, 2, 8
LINUX_64 = 0x11
LZ4, ZSTD = 0x2000, 0x8000
ARCH_SPECIFIC, FAMILY_SPECIFIC = 0x100000, 0x200000
REGION_MAGIC = 0xBA55ED50
FRAME_MAGIC = 0xFD2FB528


def padded(data: bytes, alignment: int = 8) -> bytes:
    return data + bytes(-len(data) % alignment)


def patched(data: bytes, offset: int, layout: str, *values: int) -> bytes:
    """``data`` with fields at ``offset`` overwritten; the layout is little endian."""
    changed = bytearray(data)
    struct.pack_into("<" + layout, changed, offset, *values)
    return bytes(changed)


# --- Host ELF files ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HostSection:
    """A section of a host file; ``offset`` and ``size`` override what its data says."""

    name: str
    data: bytes = b""
    kind: int = SHT_PROGBITS
    flags: int = SHF_ALLOC
    vaddr: int = 0
    link: int = 0
    entry_size: int = 0
    alignment: int = 8
    offset: int | None = None
    size: int | None = None
    name_offset: int | None = None


class HostFile(NamedTuple):
    """The file's bytes and where the data of each given section went."""

    data: bytes
    offsets: tuple[int, ...]


def build_host(
    sections: Sequence[HostSection],
    *,
    elf_class: int = 2,
    encoding: int = 1,
    machine: int = EM_X86_64,
    section_names: bytes | None = None,
    table_offset: int | None = None,
    table_entry_size: int = SECTION_HEADER.size,
    count: int | None = None,
    names_index: int | None = None,
) -> HostFile:
    """A shared object of nothing but sections; the section headers come last."""
    names = bytearray(b"\0")
    body = bytearray(ELF_HEADER.size)
    offsets: list[int] = []
    headers = [bytes(SECTION_HEADER.size)]
    own_names = HostSection(name=".shstrtab", kind=SHT_STRTAB, flags=0, data=b"", alignment=1)
    for section in (*sections, own_names):
        name_offset = len(names) if section.name_offset is None else section.name_offset
        names += section.name.encode() + b"\0"
        data = section.data
        if section is own_names:
            data = bytes(names) if section_names is None else section_names
        body += bytes(-len(body) % section.alignment)
        offsets.append(len(body))
        headers.append(
            SECTION_HEADER.pack(
                name_offset,
                section.kind,
                section.flags,
                section.vaddr,
                len(body) if section.offset is None else section.offset,
                len(data) if section.size is None else section.size,
                section.link,
                0,
                section.alignment,
                section.entry_size,
            )
        )
        if section.kind != SHT_NOBITS:
            body += data
    body += bytes(-len(body) % 8)
    ELF_HEADER.pack_into(
        body,
        0,
        bytes((0x7F, *b"ELF", elf_class, encoding, 1)),
        3,
        machine,
        1,
        0,
        0,
        len(body) if table_offset is None else table_offset,
        0,
        ELF_HEADER.size,
        56,
        0,
        table_entry_size,
        len(headers) if count is None else count,
        len(headers) - 1 if names_index is None else names_index,
    )
    return HostFile(bytes(body) + b"".join(headers), tuple(offsets[:-1]))


def fatbin_section(*regions: bytes, name: str = ".nv_fatbin") -> HostSection:
    return HostSection(name=name, data=b"".join(map(padded, regions)))


def build_id_note(build_id: bytes) -> HostSection:
    return HostSection(
        name=".note.gnu.build-id",
        kind=SHT_NOTE,
        data=struct.pack("<III", 4, len(build_id), 3) + b"GNU\0" + padded(build_id, 4),
    )


def soname_sections(soname: str, index: int) -> tuple[HostSection, HostSection]:
    """``.dynstr`` and ``.dynamic``; ``index`` is the place of the first in the section list."""
    strings = b"\0" + soname.encode() + b"\0"
    tags = DYNAMIC_TAG.pack(14, 1) + DYNAMIC_TAG.pack(0, 0)
    # Section 0 is the null section.
    return (
        HostSection(name=".dynstr", kind=SHT_STRTAB, data=strings),
        HostSection(name=".dynamic", kind=SHT_DYNAMIC, data=tags, link=index + 1),
    )


# --- Regions and elements ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ElementSpec:
    """An element; what is None follows from the rest, in a sound way."""

    content: bytes
    kind: int = CUBIN
    arch: int = 90
    flags: int = LINUX_64
    identifier: bytes = b""
    options: bytes | None = None
    padding: int = 0
    version: int = 0x0101
    payload: bytes | None = None
    header_size: int | None = None
    size: int | None = None
    compressed_size: int | None = None
    unpacked_size: int | None = None
    name_offset: int | None = None
    name_length: int | None = None
    options_offset: int | None = None

    @property
    def packed(self) -> bool:
        return bool(self.flags & (LZ4 | ZSTD))


def pack(content: bytes, flags: int) -> bytes:
    if flags & LZ4:
        return bytes(lz4.block.compress(content, store_size=False))
    if flags & ZSTD:
        return zstandard.ZstdCompressor(level=3).compress(content)
    return content


def build_element(spec: ElementSpec) -> bytes:
    """Header (with identifier and options, where there are any) and padded payload."""
    payload = pack(spec.content, spec.flags) if spec.payload is None else spec.payload
    extra = b""
    options_offset = name_offset = 0
    if spec.options is not None:
        options_offset = ELEMENT_HEADER.size
        extra = PAIR.pack(options_offset + PAIR.size, len(spec.options)) + spec.options
    if spec.identifier:
        name_offset = ELEMENT_HEADER.size + len(extra)
        extra += spec.identifier
    extra = padded(extra)
    body = padded(payload + bytes(spec.padding)) if spec.packed else payload + bytes(spec.padding)
    header = ELEMENT_HEADER.pack(
        spec.kind,
        spec.version,
        ELEMENT_HEADER.size + len(extra) if spec.header_size is None else spec.header_size,
        len(body) if spec.size is None else spec.size,
        (len(payload) if spec.packed else 0)
        if spec.compressed_size is None
        else spec.compressed_size,
        options_offset if spec.options_offset is None else spec.options_offset,
        8,
        1,
        spec.arch,
        name_offset if spec.name_offset is None else spec.name_offset,
        len(spec.identifier) if spec.name_length is None else spec.name_length,
        spec.flags,
        0,
        (len(spec.content) if spec.packed else 0)
        if spec.unpacked_size is None
        else spec.unpacked_size,
    )
    return header + extra + body


def build_region(
    elements: Sequence[ElementSpec | bytes],
    *,
    magic: int = REGION_MAGIC,
    version: int = 1,
    header_size: int = REGION_HEADER.size,
    size: int | None = None,
) -> bytes:
    body = b"".join(e if isinstance(e, bytes) else build_element(e) for e in elements)
    return (
        REGION_HEADER.pack(magic, version, header_size, len(body) if size is None else size) + body
    )


# --- Cubins --------------------------------------------------------------------------------

CALLS, ADDRESS_TAKEN, INDIRECT_CALLS, REFERENCES = (
    0xFFFFFFFF,
    0xFFFFFFFE,
    0xFFFFFFFD,
    0xFFFFFFFC,
)

_FUNC, _OBJECT = 2, 1
_ENTRY = 0x10


@dataclass(frozen=True, kw_only=True)
class CubinSpec:
    """A cubin: functions by name with their code, variables by name with their size."""

    arch: int = 90
    abi: int = 7
    arch_specific: bool = False
    relocatable: bool = False
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    device_functions: Mapping[str, bytes] = field(default_factory=dict)
    externals: Sequence[str] = ()
    global_data: Mapping[str, int] = field(default_factory=dict)
    constant_data: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[tuple[str, str]] = ()
    references: Sequence[tuple[str, str]] = ()
    address_taken: Sequence[tuple[str, str]] = ()
    indirect_calls: Sequence[tuple[str, str]] = ()
    call_graph: bytes | None = None
    symbol_names: bytes | None = None
    with_symbols: bool = True


class BuiltCubin(NamedTuple):
    """The cubin, where each function's code went, and where each section's header is."""

    data: bytes
    code_offsets: Mapping[str, int]
    header_offsets: Mapping[str, int]


def build_cubin(spec: CubinSpec) -> BuiltCubin:
    strings = bytearray(b"\0")
    # The null symbol, then one section symbol, as ptxas writes them.
    symbols = [(0, 0, 0, 0, 0, 0), (0, 3, 0, 1, 0, 0)]
    index_of: dict[str, int] = {}
    # name, kind, data, size in memory, link
    sections: list[tuple[str, int, bytes, int]] = []
    functions = {**spec.kernels, **spec.device_functions}
    # .shstrtab, .strtab, .symtab, .nv.callgraph, .nv.global, .nv.constant4, then the code.
    first_code, global_index, constant_index = 7, 5, 6

    def add_symbol(name: str, info: int, other: int, section: int, value: int, size: int) -> None:
        index_of[name] = len(symbols)
        symbols.append((len(strings), info, other, section, value, size))
        strings.extend(name.encode() + b"\0")

    for number, (name, code) in enumerate(functions.items()):
        other = _ENTRY if name in spec.kernels else 0
        add_symbol(name, 0x10 | _FUNC, other, first_code + number, 0, len(code))
    for name in spec.externals:
        add_symbol(name, 0x10 | _FUNC, 0, 0, 0, 0)
    for data, section in ((spec.global_data, global_index), (spec.constant_data, constant_index)):
        value = 0
        for name, size in data.items():
            add_symbol(name, 0x10 | _OBJECT, 0, section, value, size)
            value += size

    prototypes: dict[str, int] = {}

    def prototype(text: str) -> int:
        if text not in prototypes:
            prototypes[text] = len(strings)
            strings.extend(text.encode() + b"\0")
        return prototypes[text]

    rows: list[tuple[int, int]] = []
    for part, edges in ((CALLS, spec.calls), (REFERENCES, spec.references)):
        rows.append((0, part))
        rows += [(index_of[a], index_of[b]) for a, b in edges]
    for part, signatures in (
        (ADDRESS_TAKEN, spec.address_taken),
        (INDIRECT_CALLS, spec.indirect_calls),
    ):
        rows.append((0, part))
        rows += [(index_of[a], prototype(b)) for a, b in signatures]
    call_graph = b"".join(PAIR.pack(*row) for row in rows)
    if spec.call_graph is not None:
        call_graph = spec.call_graph
    table = b"".join(SYMBOL.pack(*row) for row in symbols)
    sections.append((".shstrtab", SHT_STRTAB, b"", 0))
    sections.append((".strtab", SHT_STRTAB, spec.symbol_names or bytes(strings), 0))
    sections.append((".symtab", SHT_SYMTAB if spec.with_symbols else SHT_PROGBITS, table, 2))
    sections.append((".nv.callgraph", SHT_CUDA_CALLGRAPH, call_graph, 3))
    sections.append((".nv.global", SHT_NOBITS, bytes(sum(spec.global_data.values())), 0))
    sections.append((".nv.constant4", SHT_PROGBITS, bytes(sum(spec.constant_data.values())), 0))
    sections += [(f".text.{name}", SHT_PROGBITS, code, 0) for name, code in functions.items()]

    section_names = bytearray(b"\0")
    name_offsets = []
    for name, _, _, _ in sections:
        name_offsets.append(len(section_names))
        section_names += name.encode() + b"\0"
    body = bytearray(ELF_HEADER.size)
    headers = [bytes(SECTION_HEADER.size)]
    code_offsets: dict[str, int] = {}
    for (name, kind, data_, link), name_offset in zip(sections, name_offsets, strict=True):
        content = bytes(section_names) if name == ".shstrtab" else data_
        body += bytes(-len(body) % 8)
        if name.startswith(".text."):
            code_offsets[name.removeprefix(".text.")] = len(body)
        headers.append(
            SECTION_HEADER.pack(name_offset, kind, 0, 0, len(body), len(content), link, 0, 8, 0)
        )
        if kind != SHT_NOBITS:
            body += content
    body += bytes(-len(body) % 8)
    table_offset = len(body)
    if spec.abi >= 8:
        flags = 0x6000002 | spec.arch << 8 | (0x8 if spec.arch_specific else 0)
    else:
        flags = 0x500000 | spec.arch << 8 & 0x500 | spec.arch
        flags |= 0x800 if spec.arch_specific else 0
    ELF_HEADER.pack_into(
        body,
        0,
        bytes((0x7F, *b"ELF", 2, 1, 1, 0x41 if spec.abi >= 8 else 0x33, spec.abi)),
        1 if spec.relocatable else 2,
        EM_CUDA,
        1,
        0,
        0,
        table_offset,
        flags,
        ELF_HEADER.size,
        56,
        0,
        SECTION_HEADER.size,
        len(headers),
        1,
    )
    return BuiltCubin(
        bytes(body) + b"".join(headers),
        code_offsets,
        {
            name: table_offset + SECTION_HEADER.size * (i + 1)
            for i, (name, _, _, _) in enumerate(sections)
        },
    )


def build_ptx(
    kernels: Sequence[str] = ("kernel",),
    *,
    functions: Sequence[str] = (),
    global_data: Sequence[str] = (),
    target: str = "sm_90",
) -> bytes:
    lines = [".version 9.0", f".target {target}", ".address_size 64", ""]
    lines += [f".global .align 4 .b8 {name}[4];" for name in global_data]
    lines += [f".func (.param .b32 out) {name}(.param .b32 in)\n{{ ret; }}" for name in functions]
    lines += [f".visible .entry {name}(\n.param .u64 p\n)\n{{ ret; }}" for name in kernels]
    return "\n".join(lines).encode() + b"\n\0"


# --- zstd frames ---------------------------------------------------------------------------


class Block(NamedTuple):
    """A zstd block: kind 0 raw, 1 RLE (one byte, ``size`` times), 2 compressed, 3 reserved."""

    kind: int
    data: bytes
    size: int | None = None


def build_frame(blocks: Sequence[Block], content_size: int, *, ended: bool = True) -> bytes:
    """A single-segment frame with its content size in 8 bytes and no checksum."""
    frame = struct.pack("<IBQ", FRAME_MAGIC, 0xE0, content_size)
    for number, block in enumerate(blocks):
        size = len(block.data) if block.size is None else block.size
        last = ended and number == len(blocks) - 1
        frame += (size << 3 | block.kind << 1 | last).to_bytes(3, "little") + block.data
    return frame


def zstd_frame(content: bytes, *, checksum: bool = False, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(content)
