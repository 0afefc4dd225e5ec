"""What is left in compacted libraries of NVIDIA's: the original's map without what went."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.spans import size
from pytest_negativa.planning.decide import plan_for_devices
from tests.support.compacting import plan_of
from tests.support.cutting import needs_stub
from tests.support.real import NEWEST, PINNED, Install
from tests.support.slimmed import (
    check_left,
    check_slimmed,
    compact,
    cut,
    read,
    read_slimmed,
    rows,
)

pytestmark = pytest.mark.real_libs

H200 = ComputeCapability(9, 0)


@pytest.mark.parametrize(
    "library",
    ["cu13/lib/libcublas.so.13", "cu13/lib/libcurand.so.10", "nccl/lib/libnccl.so.2"],
)
def test_what_devices_load(library: str, real_libs: Path, tmp_path: Path) -> None:
    before = read(real_libs / "nvidia" / library)
    plan = plan_for_devices(before, (H200,), keep_ptx=False)
    done = compact(before, plan, tmp_path / "lib.so")
    after, removed = read_slimmed(tmp_path / "lib.so", Scope())
    check_slimmed(after)
    assert rows(after) == rows(before, plan)
    assert after.problems == before.problems
    assert removed.gone_bytes == size(done.holes) > 0
    assert removed.size_before == before.library.size


def test_thousands_of_regions(real_libs: Path, tmp_path: Path) -> None:
    """cuFFT has 24,000 regions of one element each; every hundredth stays."""
    before = read(real_libs / "nvidia/cu13/lib/libcufft.so.12")
    plan = plan_of(before, lambda number: number % 100 == 7)
    done = compact(before, plan, tmp_path / "lib.so")
    after, removed = read_slimmed(tmp_path / "lib.so", Scope())
    assert rows(after) == rows(before, plan)
    assert removed.gone_bytes == size(done.holes)


@needs_stub
@pytest.mark.parametrize("packages", [PINNED, NEWEST], ids=["pinned", "newest"])
def test_all_are_read_again_after_slimming_with_a_spare(
    packages: dict[str, str], install: Install, tmp_path: Path
) -> None:
    """Of the code for one GPU; what is left of other code is no code."""
    libraries = [
        path
        for path in sorted(install(packages).glob("nvidia/**/lib/*.so*"))
        if path.stat().st_size > 10 << 20
    ]
    assert libraries
    for path in libraries:
        before = read_library(path, Scope(headers_only=True))
        plan = plan_for_devices(before, (H200,), keep_ptx=False)
        done = cut(before, plan, tmp_path)
        removed = check_left(before, plan, done)
        # The dynamic strings have a new place.
        assert 1 << 20 < removed.gone_bytes <= size(done.holes)
        done.library.unlink()
        done.spare.unlink()
