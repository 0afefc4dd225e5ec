"""Files that are GPU code themselves, object files and archives, compared with cuobjdump."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.errors import FormatError, NotElfError
from pytest_negativa.gpucode.files import read_tables
from pytest_negativa.gpucode.library import map_library, read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.file_kinds import HEAD_SIZE, FileKind, kind_of
from pytest_negativa.models.library import Compression, Cubin, LibraryMap, Scope
from pytest_negativa.planning.decide import plan_for_devices
from tests.support.builders import build_host, fatbin_section
from tests.support.invariants import check_map
from tests.support.libraries import BIN, MANIFEST

FILES = MANIFEST["files"]
H100 = ComputeCapability(9, 0)

# What nvFatbin 13.5.37 (nvFatbinAddTileIR) makes of 8 bytes magic number, 4 of version and 100
# others: not compressed, and with zstd.
TILE_IR = b"\x7fTileIR\0\x0d\x01\0\0" + bytes(range(100))
TILE_FATBINS = [
    bytes.fromhex(text)
    for text in (
        "50ed55ba01001000c8000000000000008000010158000000700000000000000000000000480000000000010d"
        "5000000040000000070000001100000000000000000000000000000000000000000000007469"
        "6c652e63750050000000000000000000000000000000" + TILE_IR.hex(),
        "50ed55ba01001000d8000000000000008000010158000000800000000000000079000000480000000000010d"
        "50000000400000000700000011800000000000000000000000000000700000000000000074"
        "696c652e6375005000000000000000000000000000000028b52ffd2070810300"
        + TILE_IR.hex()
        + 14 * "0",
    )
]


def read(path: Path, scope: Scope | None = None) -> LibraryMap:
    with ByteSource(path) as source:
        library_map = map_library(source, read_tables(source), scope or Scope())
    check_map(library_map)
    return library_map


def written(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("libmultiarch.so", FileKind.LIBRARY),
        ("program_no_pie", FileKind.LIBRARY),
        ("rdc_caller.o", FileKind.OBJECT),
        ("callgraph_rdc.sm_90.cubin", FileKind.OBJECT),
        ("librdc.a", FileKind.ARCHIVE),
        ("kernels.sm_90.cubin", FileKind.CUBIN),
        ("identifier.fatbin", FileKind.FATBIN),
        ("kernels.ptx", FileKind.PTX),
        ("kernels.ltoir", FileKind.LTO_IR),
        ("gpu.bc", FileKind.BITCODE),
    ],
)
def test_first_bytes_tell_the_kind(name: str, kind: FileKind) -> None:
    assert kind_of((BIN / name).read_bytes()[:HEAD_SIZE]) is kind
    assert read(BIN / name).library.file_kind is kind


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"// a script\nfunction version() {}\n",
        b"// .version 8.0\n// .target sm_90\n",
        b".version = 3\n",
        b"!<other>\n",
    ],
)
def test_other_files(head: bytes) -> None:
    assert kind_of(head) is None


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.endswith(".cubin")))
def test_cubins(name: str) -> None:
    library_map = read(BIN / name)
    (section,) = library_map.sections
    (block,) = section.iter_code()
    (expected,) = FILES[name]["cuobjdump"]["elements"]
    assert (block.payload.start, block.payload.end) == (0, FILES[name]["size"])
    assert (block.kind, block.compression) == (ElementKind.CUBIN, Compression.NONE)
    assert str(block.arch).removesuffix("f") in name.replace("100f", "100")
    kernels = sorted(k.name for k in library_map.kernels_of(block.content))
    assert kernels == expected["kernels"]
    assert isinstance(block.content, Cubin)
    assert block.content.sha256 == FILES[name]["sha256"]
    (headers,) = read(BIN / name, Scope(headers_only=True)).iter_code()
    assert (headers.arch, headers.content) == (block.arch, None)


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.endswith(".fatbin")))
def test_fatbins(name: str) -> None:
    library_map = read(BIN / name)
    (region,) = library_map.iter_regions()
    expected = FILES[name]["cuobjdump"]["elements"]
    assert [(e.kind.name, str(e.arch), e.identifier) for e in region.elements] == [
        (e["kind"], e["arch"], e["identifier"]) for e in expected
    ]
    found = [sorted(k.name for k in library_map.kernels_of(e.content)) for e in region.elements]
    assert [k for k, e in zip(found, expected, strict=True) if "kernels" in e] == [
        e["kernels"] for e in expected if "kernels" in e
    ]


def test_ptx() -> None:
    library_map = read(BIN / "kernels.ptx")
    (block,) = library_map.iter_code()
    assert (block.kind, str(block.arch)) == (ElementKind.PTX, "sm_90")
    (cubin,) = FILES["kernels.sm_90.cubin"]["cuobjdump"]["elements"]
    assert sorted(k.name for k in library_map.kernels_of(block.content)) == cubin["kernels"]


@pytest.mark.parametrize(
    ("name", "kind", "arch"),
    [("kernels.ltoir", ElementKind.LTO_IR, "sm_90"), ("gpu.bc", ElementKind.BITCODE, "sm_00")],
)
def test_intermediate_code(name: str, kind: ElementKind, arch: str) -> None:
    (block,) = read(BIN / name).iter_code()
    assert (block.kind, str(block.arch), block.payload.size) == (kind, arch, FILES[name]["size"])


def test_bitcode_for_a_cpu_is_no_gpu_code() -> None:
    assert read(BIN / "cpu.bc").sections == ()


def test_triple_is_found_at_any_bit(tmp_path: Path) -> None:
    """Bitcode without a symbol table has the triple in characters of 12 bits alone."""
    data = (BIN / "gpu.bc").read_bytes()
    module = int.from_bytes(data.replace(b"nvptx", b"other")[4:], "little")
    for shift in range(8):
        shifted = b"BC\xc0\xde" + (module << shift).to_bytes(len(data) - 3, "little")
        assert read(written(tmp_path, shifted)).sections, shift


@pytest.mark.parametrize("data", TILE_FATBINS, ids=["plain", "zstd"])
def test_tile_ir_in_a_fatbin(data: bytes, tmp_path: Path) -> None:
    library_map = read(written(tmp_path, data))
    (element,) = library_map.iter_code()
    assert (element.kind, element.kind_number) == (ElementKind.TILE_IR, 128)
    assert (element.identifier, element.unpacked_size) == ("tile.cu", len(TILE_IR))
    assert not library_map.problems and element.unreadable is None


def test_tile_ir_by_itself(tmp_path: Path) -> None:
    (block,) = read(written(tmp_path, TILE_IR)).iter_code()
    assert (block.kind, str(block.arch)) == (ElementKind.TILE_IR, "sm_00")


@pytest.mark.parametrize("name", ["librdc.a", "rdc_caller.o"])
def test_members_and_objects_are_those_of_cuobjdump(name: str) -> None:
    library_map = read(BIN / name)
    assert library_map.library.file_kind.is_link_time
    found = [
        (str(b.arch), sorted(k.name for k in library_map.kernels_of(b.content)))
        for b in library_map.iter_code()
    ]
    expected = FILES[name]["cuobjdump"]["elements"]
    assert found == [(e["arch"], e["kernels"]) for e in expected]


def test_offsets_of_members_are_those_of_the_archive() -> None:
    data = (BIN / "librdc.a").read_bytes()
    labels = {section.label for section in read(BIN / "librdc.a").sections}
    assert labels == {
        f"{member}:__nv_relfatbin"
        for member in ("rdc_caller.o", "rdc_callee.o", "member_with_a_long_name.o")
    }
    for region in read(BIN / "librdc.a").iter_regions():
        assert data[region.span.start :].startswith(b"\x50\xed\x55\xba")


def member(name: str, data: bytes) -> bytes:
    return f"{name:<48}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) & 1)


def test_archive_of_any_code(tmp_path: Path) -> None:
    """A damaged member doesn't hide the others."""
    cubin = (BIN / "kernels.sm_90.cubin").read_bytes()
    archive = (
        b"!<arch>\n"
        + member("//", b"long.cub/\n")
        + member("notes.txt/", b"text")
        + member("other.o/", build_host([], elf_class=1).data)
        + member("broken.o/", (BIN / "rdc_caller.o").read_bytes()[:5001])
        + member("/0", cubin)
        + member("code.bc/", (BIN / "gpu.bc").read_bytes())
    )
    library_map = read(written(tmp_path, archive))
    assert [s.label for s in library_map.sections] == ["long.cub", "code.bc"]
    (problem,) = library_map.problems
    assert "member broken.o: section headers end at " in problem
    first = next(library_map.iter_code())
    assert isinstance(first.content, Cubin)
    assert first.content.sha256 == hashlib.sha256(cubin).hexdigest()


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        (b"x" * 60, "no header of an archive's member"),
        (member("a/", b"12345678")[:-4], "an archive's member ends at 0x4c, the file at 0x48"),
    ],
)
def test_damaged_archives(rest: bytes, problem: str, tmp_path: Path) -> None:
    library_map = read(written(tmp_path, b"!<arch>\n" + rest))
    (found,) = library_map.problems
    assert found.endswith(f": {problem}")


def test_members_with_one_name_that_fills_the_table(tmp_path: Path) -> None:
    ptx = member("/0", (BIN / "kernels.ptx").read_bytes())
    archive = b"!<arch>\n" + member("//", b"a" * 1_000_000) + ptx * 2
    assert [s.member for s in read(written(tmp_path, archive)).sections] == ["a" * 4096] * 2


def test_thin_archives_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotElfError, match="a thin archive, whose members are files of their own"):
        read(written(tmp_path, b"!<thin>\n", "lib.a"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xbe\0", "cubin of 20 bytes, expected 64"),
        ((BIN / "kernels.sm_90.cubin").read_bytes()[:4000], "section headers end at"),
    ],
)
def test_damaged_cubins_are_unreadable(data: bytes, problem: str, tmp_path: Path) -> None:
    (block,) = read(written(tmp_path, data)).iter_code()
    assert block.unreadable is not None and problem in block.unreadable


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("identifier.fatbin", "is a bare fatbin"),
        ("kernels.ptx", "is PTX"),
        ("librdc.a", "is a static archive"),
    ],
)
def test_no_library(name: str, what: str) -> None:
    """Plans are made of libraries alone."""
    with pytest.raises(FormatError, match=f": {what}.*; expected a library or program"):
        read_library(BIN / name, Scope())


def test_tile_ir_stays_whatever_a_plan_says(tmp_path: Path) -> None:
    host = build_host([fatbin_section(TILE_FATBINS[0])])
    path = written(tmp_path, host.data, "host.so")
    plan = plan_for_devices(read_library(path, Scope()), [H100], keep_ptx=False)
    (decision,) = plan.decisions
    assert (decision.kept, decision.reason) == (True, "unreadable")
