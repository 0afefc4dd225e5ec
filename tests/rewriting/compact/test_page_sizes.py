"""Libraries for aarch64, whose kernels have pages of 4, 16 or 64 KiB: what each would map."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_negativa.gpucode.elf_tables import EM_AARCH64, SHF_EXECINSTR
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import size as span_size
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.original_tables import read_tables
from pytest_negativa.rewriting.compact.records import Smaller
from tests.support.compacting import (
    Image,
    assert_same_image,
    build,
    gpu_code,
    image,
    needs_compiler,
    plan_of,
    read,
)

pytestmark = needs_compiler

LARGEST = 65536
# Pages of 64 KiB leave the file, of one region more than one run of them.
SHAPES = ((150_000,), (64,), (140_000, 20_000, 30_000, 140_000), (200_000,))
SOURCE = """
extern "C" const char fatbin_start[];
extern "C" __attribute__((visibility("hidden"))) char ldata_start[];
static int zeros[50000], initialised = 1;
extern "C" const void *use(int i) {
    return i ? (char *) &zeros[i] : initialised ? fatbin_start : ldata_start;
}
"""


@dataclass(frozen=True)
class Slimmed:
    """A library, its map, and a plan with the result."""

    path: Path
    library_map: LibraryMap
    plan: LibraryPlan
    target: Path
    result: Smaller

    def assert_same_memory(self, page: int) -> None:
        before, after = mapped(self.path, page), mapped(self.target, page)
        loads = before.image.loads
        pair = in_segments(before.image, loads), in_segments(after.image, loads)
        assert_same_image(*pair, self.library_map, self.plan)
        # A part of a segment without code may lose the right to be executed, and none else.
        pairs = set(zip(before.protections, after.protections, strict=True))
        assert {pair for pair in pairs if pair[0] != pair[1]} <= {(5, 4)}
        for start, end in code_of(self.path):
            assert set(after.protections[start // page : -(-end // page)]) == {5}


@dataclass(frozen=True)
class Mapped:
    """What ld.so makes of a file: bytes by address, and the protection of each page."""

    image: Image
    protections: list[int]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_aarch64(tmp_path_factory.mktemp("library"), LARGEST)


@pytest.fixture(scope="module")
def slimmed(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Slimmed:
    return compact(library, tmp_path_factory.mktemp("slimmed") / "small.so")


def build_aarch64(folder: Path, alignment: int) -> Path:
    """A library that states the machine; only its code may be another machine's."""
    path = build(
        folder,
        f"-Wl,-z,max-page-size={alignment}",
        fatbin=gpu_code(1, SHAPES),
        ldata=gpu_code(2, SHAPES, padding=40),
        source=SOURCE,
    )
    with path.open("r+b") as file:
        file.seek(18)
        file.write(struct.pack("<H", EM_AARCH64))
    return path


def mapped(path: Path, page: int) -> Mapped:
    """Map a library in pages of ``page`` bytes.

    As ``_dl_map_object_from_fd`` and ``_dl_map_segments`` of glibc do it.

    Raises:
        OSError: ld.so refuses the library.
    """
    data, found = path.read_bytes(), image(path)
    memory = bytearray(-(-len(found.memory) // page) * page)
    protections = [0] * (len(memory) // page)
    for _, flags, offset, vaddr, _, size, memory_size, _ in found.loads:
        if (vaddr - offset) % page:
            raise OSError("ELF load command address/offset not page-aligned")
        start, before = vaddr - vaddr % page, vaddr % page
        end = -(-(vaddr + size) // page) * page
        content = data[offset - before : offset - before + end - start]
        memory[start:end] = content.ljust(end - start, b"\0")
        if memory_size > size:
            zeros_end = max(end, -(-(vaddr + memory_size) // page) * page)
            memory[vaddr + size : zeros_end] = bytes(zeros_end - vaddr - size)
            end = zeros_end
        protections[start // page : end // page] = [flags] * ((end - start) // page)
    return Mapped(Image(bytes(memory), found.loads, found.headers), protections)


def in_segments(memory: Image, loads: tuple[tuple[int, ...], ...]) -> Image:
    """Without what rounding to pages maps around the segments."""
    clean = bytearray(len(memory.memory))
    for _, _, _, vaddr, _, _, size, _ in loads:
        clean[vaddr : vaddr + size] = memory.at(vaddr, size)
    return Image(bytes(clean), memory.loads, memory.headers)


def code_of(path: Path) -> list[tuple[int, int]]:
    """Addresses of the sections with code."""
    with ByteSource(path) as source:
        sections = read_tables(source).sections
    found = [s for s in sections if s.sh_flags & SHF_EXECINSTR]
    return [(s.sh_addr, s.sh_addr + s.sh_size) for s in found]


def compact(path: Path, target: Path) -> Slimmed:
    library_map = read(path)
    plan = plan_of(library_map, lambda number: number % 7 == 3)
    result = compact_library(path, target, library_map, plan)
    return Slimmed(path, library_map, plan, target, result)


@pytest.mark.parametrize("page", [4096, 16384, LARGEST])
def test_every_kernel_maps_what_it_mapped_before(slimmed: Slimmed, page: int) -> None:
    assert len(slimmed.result.holes) > 3
    assert span_size(slimmed.result.holes) > slimmed.result.size_before // 3
    slimmed.assert_same_memory(page)


def test_holes_are_pages_of_the_largest_kernel(slimmed: Slimmed) -> None:
    for _, _, offset, vaddr, _, _, _, alignment in image(slimmed.target).loads:
        assert alignment == LARGEST
        assert (vaddr - offset) % LARGEST == 0


@pytest.mark.slow
def test_a_library_linked_for_small_pages_alone(tmp_path: Path) -> None:
    """No kernel of larger pages loads the original, so smaller holes take nothing away."""
    path = build_aarch64(tmp_path / "build", 4096)
    small = compact(path, tmp_path / "small.so")
    small.assert_same_memory(4096)
    for library in (path, small.target):
        with pytest.raises(OSError, match="not page-aligned"):
            mapped(library, LARGEST)
