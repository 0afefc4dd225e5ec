"""Cubins that lie in the data of a library as they are: found, and kept by every plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Compression, LibraryMap, Scope
from pytest_negativa.models.plan import KeepReason
from pytest_negativa.planning.decide import KeepPolicy, plan_for_devices, plan_library
from pytest_negativa.planning.locate import locate_library
from tests.support.builders import HostSection, build_host
from tests.support.invariants import check_map
from tests.support.libraries import BIN, MANIFEST
from tests.support.scanner import scan
from tests.support.usages import library_usage, usage_of

H100 = ComputeCapability(9, 0)
SM_80, SM_90 = "kernels.sm_80.cubin", "kernels.sm_90.cubin"
CUBINS = {name: (BIN / name).read_bytes() for name in (SM_80, SM_90)}


def read(
    folder: Path, data: bytes, name: str = ".rodata", *, executable: bool = False
) -> LibraryMap:
    flags = 0x6 if executable else 0x2
    path = folder / "library.so"
    path.write_bytes(build_host([HostSection(name=name, data=data, flags=flags)]).data)
    library_map = read_library(path, Scope())
    check_map(library_map)
    return library_map


@pytest.fixture
def library_map(tmp_path: Path) -> LibraryMap:
    return read(tmp_path, b"text\0" + CUBINS[SM_80] + bytes(3) + CUBINS[SM_90] + b"more text")


def test_they_are_found(library_map: LibraryMap) -> None:
    blocks = list(library_map.iter_code())
    assert [(b.payload.size, str(b.arch), b.compression) for b in blocks] == [
        (len(CUBINS[SM_80]), "sm_80", Compression.NONE),
        (len(CUBINS[SM_90]), "sm_90", Compression.NONE),
    ]
    assert [f.digest for f in library_map.iter_frames()] == [
        MANIFEST["files"][name]["sha256"] for name in (SM_80, SM_90)
    ]
    seen = scan(Path(library_map.library.path))
    assert (sum(seen.elements.values()), len(seen.kernels)) == (2, 2)


@pytest.mark.parametrize(
    "data",
    [
        CUBINS[SM_90][:-1],
        CUBINS[SM_90][:64],
        b"\x7fELF\x02\x01\x01" * 99,
        (BIN / "libplain.so").read_bytes(),
    ],
    ids=["cut", "header alone", "magic alone", "for the CPU"],
)
def test_other_data(data: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, data).sections == ()


def test_code_holds_none(tmp_path: Path) -> None:
    assert read(tmp_path, CUBINS[SM_90], ".text", executable=True).sections == ()


def test_tables_beyond_the_budget_end_the_search(tmp_path: Path) -> None:
    """Headers that all claim the same long table would be read again and again."""
    header = bytearray(CUBINS[SM_90][:64])
    header[0x20:0x30] = (1 << 40).to_bytes(8, "little") + bytes(8)
    header[0x3C:0x3E] = (1000).to_bytes(2, "little")
    with pytest.raises(FormatError, match="too many overlapping headers"):
        read(tmp_path, bytes(header) * 2000)


def test_plans_keep_them(library_map: LibraryMap) -> None:
    first, second = (block.payload.start for block in library_map.iter_code())
    usage = usage_of(library_usage(library_map, {second: ["scale"]}))
    located = locate_library(library_map, usage.libraries[0], usage)
    plan = plan_library(located, [H100], KeepPolicy(granularity="kernel"))
    assert [(d.start, d.kept, d.reason) for d in plan.decisions] == [
        (first, True, KeepReason.PLAIN_CUBIN.value),
        (second, True, KeepReason.LOADED.value),
    ]
    assert plan.trimmed == ()
    assert [kernel.name for kernel in plan.used_kernels] == ["scale"]
    by_arch = plan_for_devices(library_map, [H100], keep_ptx=False)
    assert [d.reason for d in by_arch.decisions] == [KeepReason.PLAIN_CUBIN.value] * 2
