"""Kernel granularity on NVIDIA's own libraries, with cuobjdump as the judge."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Cubin, Element, LibraryMap, Scope
from pytest_negativa.models.plan import LibraryPlan, TrimmedCubin
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.rewriting.cubin_code import overwrite_code
from pytest_negativa.rewriting.layout import Patch
from pytest_negativa.rewriting.plan_edits import trim_kernels
from tests.support.usages import library_usage, usage_of

pytestmark = pytest.mark.real_libs

H200, B200 = ComputeCapability(9, 0), ComputeCapability(10, 0)
SHOWN = 4
"""Cubins that cuobjdump is asked about."""


def plan_of_first_kernels(library_map: LibraryMap, device: ComputeCapability = H200) -> LibraryPlan:
    """As if a run had used the first kernel of every region and frame that fits the device."""
    images = {}
    for region in library_map.iter_regions():
        kernels = [k.name for e in region.elements for k in library_map.kernels_of(e.content)]
        if kernels:
            images[region.span.start] = kernels[:1]
    memory = {
        f.digest: (f.unpacked_size, [library_map.kernels_of(f.content)[0].name])
        for f in library_map.iter_frames()
        if f.digest is not None and isinstance(f.content, Cubin) and f.content.kernels
    }
    usage = usage_of(library_usage(library_map, images), memory=memory)
    located = locate_library(library_map, usage.libraries[0], usage)
    return plan_library(located, (device,), KeepPolicy(granularity="kernel"))


def listing(cuobjdump: Path, cubin: Path) -> list[str]:
    done = subprocess.run([cuobjdump, "-elf", cubin], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """``cuobjdump -elf`` by section, as it prints them: ``.text.name`` and what is below."""
    name, body = "", list[str]()
    for line in lines:
        if line.startswith("."):
            yield name, body
            name, body = line.split()[0], []
        body.append(line)
    yield name, body


@pytest.mark.parametrize(
    "library",
    [
        "cu13/lib/libcublas.so.13",
        "cu13/lib/libcublasLt.so.13",  # frames
        "cu13/lib/libcurand.so.10",  # not compressed
        "nccl/lib/libnccl.so.2",  # linked on the device
    ],
)
def test_every_cubin_can_be_trimmed(
    real_libs: Path, cuobjdump: Path, tmp_path: Path, library: str
) -> None:
    check(real_libs / "nvidia" / library, cuobjdump, tmp_path)


def test_every_cubin_of_torch_can_be_trimmed(
    torch_cuda: Path, cuobjdump: Path, tmp_path: Path
) -> None:
    check(torch_cuda, cuobjdump, tmp_path)


def test_code_with_capsules_is_counted(real_libs: Path, cuobjdump: Path, tmp_path: Path) -> None:
    """From sm_100 on, each function has a capsule, and the plan tells what stays for them."""
    path = real_libs / "nvidia/cu13/lib/libcublas.so.13"
    library_map = read_library(path, Scope(devices=("10.0",)))
    found = []
    for region in library_map.iter_regions():
        cubins = [e for e in region.elements if library_map.kernels_of(e.content)]
        if len(cubins) == 1 and is_choice_of_kernels(cubins[0]):
            found.append((cubins[0].unpacked_size, region.span.start, cubins[0]))
    shown = sorted(found, key=lambda row: row[:2])[:SHOWN]
    assert len(shown) == SHOWN
    images = {start: [library_map.kernels_of(block.content)[0].name] for _, start, block in shown}
    used = {name for names in images.values() for name in names}
    unused = 0
    with ByteSource(path) as source:
        for _, _, block in shown:
            stored = source.read(block.payload.start, block.stored_size)
            cubin = tmp_path / "with_capsules.cubin"
            cubin.write_bytes(unpack(stored, block.compression, block.unpacked_size))
            sizes = section_sizes(listing(cuobjdump, cubin))
            code = {name.removeprefix(".text.") for name in sizes if name.startswith(".text.")}
            assert code == {k.name for k in library_map.kernels_of(block.content)}
            assert all(sizes[f".nv.capmerc.text.{name}"] for name in code)
            unused += sum(sizes[f".text.{name}"] for name in code - used)

    usage = usage_of(library_usage(library_map, images))
    located = locate_library(library_map, usage.libraries[0], usage)
    plan = plan_library(located, (B200,), KeepPolicy(granularity="kernel"))
    assert plan.trimmed == () and unused > 0
    assert [note for note in plan.notes if "capsules (.nv.capmerc)" in note] == [
        f"{SHOWN} loaded elements stay whole, unused kernels too ({unused:,} bytes of code): "
        "NVIDIA's linker crashes on overwritten sm_100 code and capsules (.nv.capmerc)"
    ]


def is_choice_of_kernels(block: Element) -> bool:
    """Whether all functions of a cubin are kernels, and some can be left out."""
    cubin = block.content
    return isinstance(cubin, Cubin) and len(cubin.kernels) > 1 and not cubin.device_functions


def section_sizes(lines: list[str]) -> dict[str, int]:
    """By name, in bytes, of the table that ``cuobjdump -elf`` prints first."""
    rows = (line.split() for line in lines[: lines.index(".section .strtab")])
    return {row[-1]: int(row[2], 16) for row in rows if len(row) > 8 and row[-1].startswith(".")}


def check(path: Path, cuobjdump: Path, folder: Path) -> None:
    library_map = read_library(path, Scope(devices=("9.0",)))
    plan = plan_of_first_kernels(library_map)
    trimmed = {t.start: t for t in plan.trimmed}
    assert trimmed

    with ByteSource(path) as source:
        edits, cubins = trim_kernels(source, library_map, plan, 1)
        assert {c.left_alone for c in cubins} == {None}
        # Relocations say the same as the call graph.
        assert [(c.start, c.filled) for c in cubins] == [(t.start, t.unused) for t in plan.trimmed]
        assert sum(c.stored_after for c in cubins) <= sum(c.stored_before for c in cubins)
        patches = {p.start: p for p in edits.changes if isinstance(p, Patch)}
        pairs = [
            pair
            for block in library_map.iter_code()
            if (pair := unpacked(source, block, trimmed, patches)) is not None
        ]
    for cubin, old, new in pairs:
        assert new == overwrite_code(old, cubin.unused, 1).applied_to(old, 0)
        for code in cubin.unused:
            assert new[code.start : code.end] == b"\1" * code.size
    # The smallest: cuobjdump takes minutes for the largest.
    pairs.sort(key=lambda pair: len(pair[1]))
    for cubin, old, new in pairs[:SHOWN]:
        judge(cuobjdump, folder, cubin, old, new)


def unpacked(
    source: ByteSource,
    block: Element,
    trimmed: dict[int, TrimmedCubin],
    patches: dict[int, Patch],
) -> tuple[TrimmedCubin, bytes, bytes] | None:
    """A trimmed cubin before and after; None for what isn't trimmed, or not compressed."""
    start, compression, size = block.payload.start, block.compression, block.unpacked_size
    if start not in trimmed or start not in patches:
        return None
    old = unpack(source.read(start, block.stored_size), compression, size)
    new = patches[start].data
    if block.region is not None:
        field = patches[block.header_offset + 0x10].data
        new = new[: int.from_bytes(field, "little")]
    return trimmed[start], old, unpack(new, compression, size)


def judge(cuobjdump: Path, folder: Path, cubin: TrimmedCubin, old: bytes, new: bytes) -> None:
    """cuobjdump reads the result, and prints the same of all that is not for unused kernels."""
    before, after = folder / "before.cubin", folder / "after.cubin"
    before.write_bytes(old)
    after.write_bytes(new)
    was, now = (dict(sections(listing(cuobjdump, path))) for path in (before, after))
    gone = gone_of(cubin, old)
    ends = tuple(f".{name}" for name in gone)
    kept = {name for name in was if name.startswith(".") and not name.endswith(ends)}
    assert {name.removeprefix(".text.") for name in kept} >= {*cubin.kept}
    # ".section" are the tables, which name what is gone.
    for name in kept - {".section"}:
        assert now[name] == [without_names(line, gone) for line in was[name]]
    assert now.keys() - kept - {"", ".text."} == set()
    assert len(was) > len(kept)


def without_names(line: str, names: set[str]) -> str:
    """``.nv.info`` names functions by their symbols, "function: NAME(0xf)"."""
    before, word, after = line.partition("function: ")
    name, bracket, rest = after.partition("(0x")
    return before + word + ("" if name in names else name) + bracket + rest


def gone_of(cubin: TrimmedCubin, content: bytes) -> set[str]:
    names = NameTable()
    read = parse_cubin(content, names)
    unused = {code.start for code in cubin.unused}
    functions = (*read.kernels, *read.device_functions)
    return {names.names()[f.name] for f in functions if f.offset_in_cubin in unused}
