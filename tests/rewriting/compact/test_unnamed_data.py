"""Data that no table of the ELF file names, and sections that we don't know."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.compact import compact_library, design_compaction
from pytest_negativa.rewriting.compact.records import CannotCompactError, CompactOptions
from tests.support.compacting import build, needs_compiler
from tests.support.faults import PlantedFault
from tests.support.slimmed import dropped, refusal

pytestmark = needs_compiler

ALWAYS = CompactOptions(min_gain=-(1 << 30))
UNKNOWN = """
    .section .our.manifest, "", @progbits
    .ascii "read by another tool"
    .section .ours.too, "", @progbits
    .ascii "and so is this"
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("library"), "-g", extra=UNKNOWN).read_bytes()


def with_archive(data: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("model.py", "print('from the archive')")
    return data + archive.getvalue()


def with_signature(data: bytes) -> bytes:
    return data + bytes(4096) + b"\x30\x82signature~Module signature appended~\n"


def headers_as_patchelf_leaves_them(data: bytes) -> bytes:
    """The section headers are at the end now, and the old ones are still there."""
    start = struct.unpack_from("<Q", data, 40)[0]
    count = struct.unpack_from("<H", data, 60)[0]
    padding = -len(data) % 8
    moved = bytearray(data + bytes(padding) + data[start : start + 64 * count])
    struct.pack_into("<Q", moved, 40, len(data) + padding)
    return bytes(moved)


@pytest.mark.planted_fault(
    "A library has data behind its ELF image, such as a zip archive.",
    says="are in no section or segment",
)
@pytest.mark.parametrize("plant", [with_archive, with_signature])
def test_unnamed_data_is_never_dropped(
    plant: Callable[[bytes], bytes], library: bytes, tmp_path: Path, fault: PlantedFault
) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(plant(library))
    result = refusal(path, tmp_path / "small.so", options=ALWAYS)
    fault.check(result.reason)
    with ByteSource(path) as source, pytest.raises(CannotCompactError):
        design_compaction(source, None, None, None, ALWAYS)
    assert [p.name for p in tmp_path.iterdir()] == ["library.so"]


def test_padding_at_the_end_may_go(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(library + bytes(10_000))
    compact_library(path, tmp_path / "small.so", options=ALWAYS)


def test_section_headers_that_patchelf_moved(library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(headers_as_patchelf_leaves_them(library))
    compact_library(path, tmp_path / "small.so", options=ALWAYS)


def test_only_symbols_and_debug_information_are_stripped(library: bytes, tmp_path: Path) -> None:
    path, target = tmp_path / "library.so", tmp_path / "small.so"
    path.write_bytes(library)
    compact_library(path, target, options=ALWAYS)
    gone = {name for name in dropped(path, target) if not name.startswith(".debug")}
    assert gone == {".symtab", ".strtab"}
    for text in (b"read by another tool", b"and so is this"):
        assert target.read_bytes().count(text) == 1
