"""NVIDIA's own libraries against a second reader and cuobjdump."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ElementKind
from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.library import Cubin, Element, LibraryMap, Scope, Section
from tests.support.walker import Walked, walk

pytestmark = pytest.mark.real_libs

HEADERS = Scope(headers_only=True)


class Expected(NamedTuple):
    """A library, and how the walker must look into its sections."""

    path: str
    sections: dict[str, str]


LIBRARIES = {
    "cublas": Expected("nvidia/cu13/lib/libcublas.so.13", {".nv_fatbin": "regions"}),
    "cublasLt": Expected(
        "nvidia/cu13/lib/libcublasLt.so.13",
        {".nv_fatbin": "regions", ".cask_resource": "mixed", ".ldata": "frames", ".data": "frames"},
    ),
    "cufft": Expected(
        "nvidia/cu13/lib/libcufft.so.12", {".nv_fatbin": "regions", ".ldata": "mixed"}
    ),
    "curand": Expected("nvidia/cu13/lib/libcurand.so.10", {".nv_fatbin": "regions"}),
    "nccl": Expected(
        "nvidia/nccl/lib/libnccl.so.2", {".nv_fatbin": "regions", "__nv_relfatbin": "regions"}
    ),
}


@pytest.fixture(params=LIBRARIES)
def expected(request: pytest.FixtureRequest) -> Expected:
    return LIBRARIES[request.param]


OLD_ARCHS = ("sm_35", "sm_50", "sm_52", "sm_60", "sm_61", "sm_70")


def test_library_of_cuda_9(real_libs: Path) -> None:
    """Equals the listing of cuobjdump 11.8, the last one that reads sm_35."""
    path = real_libs / "xgboost" / "lib" / "libxgboost.so"
    library_map = read_library(path, Scope())
    assert_equals_walk(library_map, walk(path, {".nv_fatbin": "regions"}))
    assert element_counts(list(library_map.sections)) == {
        **{(arch, "cubin"): 9 for arch in OLD_ARCHS},
        ("sm_70", "ptx"): 9,
    }
    assert not summarize(library_map).problems
    kernels = Counter(
        (str(e.arch), e.kind.value)
        for e in library_map.iter_code()
        for _ in library_map.kernels_of(e.content)
    )
    assert kernels == {
        **{(arch, "cubin"): 159 for arch in OLD_ARCHS},
        ("sm_70", "ptx"): 159,
    }

    for arch, status in (("sm_70", 0), ("sm_30", 1)):
        command = ["inspect", "--no-cache", "--require-arch", arch, str(path)]
        assert CliRunner().invoke(main, command).exit_code == status


def element_counts(sections: list[Section]) -> Counter[tuple[str, str]]:
    return Counter((str(e.arch), e.kind.value) for e in elements(sections))


def elements(sections: list[Section]) -> list[Element]:
    return [e for s in sections for region in s.regions for e in region.elements]


def assert_equals_walk(library_map: LibraryMap, walked: dict[str, Walked]) -> None:
    assert {s.name for s in library_map.sections} == set(walked)
    for section in library_map.sections:
        seen = walked[section.name]
        stored: Counter[tuple[str, str]] = Counter()
        unpacked: Counter[tuple[str, str]] = Counter()
        for element in elements([section]):
            stored[str(element.arch), element.kind.value] += element.payload.size
            unpacked[str(element.arch), element.kind.value] += element.unpacked_size
        assert len(section.regions) == seen.regions
        assert sum(region.span.size for region in section.regions) == seen.accounted
        assert element_counts([section]) == seen.elements
        assert stored == seen.stored
        assert unpacked == seen.unpacked
        frames = {f.span.start: (f.span.size, f.unpacked_size) for f in section.frames}
        assert frames == seen.frames


def test_equals_independent_walk(real_libs: Path, expected: Expected) -> None:
    path = real_libs / expected.path
    assert_equals_walk(read_library(path, HEADERS), walk(path, expected.sections))


def test_equals_cuobjdump_listing(real_libs: Path, cuobjdump: Path, expected: Expected) -> None:
    path = real_libs / expected.path
    library_map = read_library(path, HEADERS)
    # It looks into no other section: whatever lies elsewhere is compared with the walk alone.
    seen = [s for s in library_map.sections if s.name in (".nv_fatbin", "__nv_relfatbin")]
    listed = {
        (arch, kind): count
        for kind, option, suffix in (("cubin", "-lelf", "cubin"), ("ptx", "-lptx", "ptx"))
        for arch, count in list_archs(cuobjdump, option, suffix, path).items()
    }
    assert without_family(element_counts(seen)) == listed


def without_family(counts: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """As cuobjdump lists it: family-specific code under the plain arch."""
    plain: Counter[tuple[str, str]] = Counter()
    for (arch, kind), count in counts.items():
        plain[arch.removesuffix("f"), kind] += count
    return plain


def list_archs(cuobjdump: Path, option: str, suffix: str, path: Path) -> Counter[str]:
    # -all: without it, relocatable code is not listed beside linked code.
    done = subprocess.run([cuobjdump, "-all", option, path], capture_output=True, text=True)
    # Exit status 0 and a note on stderr where there is nothing of the kind.
    assert done.returncode == 0, done.stderr
    return Counter(re.findall(rf"\.(sm_\w+)\.{suffix}$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("name", ["cublas", "curand", "nccl"])
def test_sizes_and_kernels_equal_cuobjdump(
    real_libs: Path, cuobjdump: Path, tmp_path: Path, name: str
) -> None:
    path = real_libs / LIBRARIES[name].path
    library_map = read_library(path, Scope(devices=("9.0",)))
    subprocess.run(
        [cuobjdump, "-xelf", ".sm_90.", path], cwd=tmp_path, check=True, capture_output=True
    )
    extracted = sorted(tmp_path.iterdir(), key=lambda p: int(p.name.split(".")[-3]))
    # Where there is linked code, cuobjdump leaves relocatable code out.
    ours = [
        e
        for s in library_map.sections
        if s.name == ".nv_fatbin"
        for e in elements([s])
        if (str(e.arch), e.kind) == ("sm_90", ElementKind.CUBIN)
    ]
    assert [p.stat().st_size for p in extracted] == [e.unpacked_size for e in ours]
    step = max(1, len(ours) // 20)
    compared = 0
    for file, element in list(zip(extracted, ours, strict=True))[::step]:
        assert isinstance(element.content, Cubin)
        dump = subprocess.run(
            [cuobjdump, "-elf", file], check=True, capture_output=True, text=True
        ).stdout
        kernels = {k.name: k.code_size for k in library_map.kernels_of(element.content)}
        assert kernels == entry_symbols(dump)
        compared += len(kernels)
    assert compared > 10


def entry_symbols(dump: str) -> dict[str, int]:
    """Kernels and their code sizes in the output of ``cuobjdump -elf``."""
    row = re.compile(r"^ +0x[0-9a-f]+ +\w+ +(\w+) +FUNC .* ENTRY .* (\S+)$", re.MULTILINE)
    return {name: int(size, 16) for size, name in row.findall(dump)}


def test_all_readable(real_libs: Path, expected: Expected) -> None:
    library_map = read_library(real_libs / expected.path, Scope(devices=("9.0",)))
    summary = summarize(library_map)
    assert summary.problems == ()
    assert summary.kernels


def test_torch(torch_cuda: Path) -> None:
    library_map = read_library(torch_cuda, HEADERS)
    walked = walk(torch_cuda, {".nv_fatbin": "regions"})
    assert_equals_walk(library_map, walked)
    section = walked[".nv_fatbin"]
    # Nothing between the regions: no byte of the section is unaccounted for.
    assert section.accounted == section.size


def test_torch_listing(torch_cuda: Path, cuobjdump: Path) -> None:
    library_map = read_library(torch_cuda, HEADERS)
    listed = list_archs(cuobjdump, "-lelf", "cubin", torch_cuda)
    assert element_counts(list(library_map.sections)) == {
        (arch, "cubin"): count for arch, count in listed.items()
    }
