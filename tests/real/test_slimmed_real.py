"""What is left in compacted libraries of NVIDIA's: the original's map without what went."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.models.library import Scope
from pytest_negativa.planning.without_trace import plan_for_devices
from tests.support.compacting import plan_of
from tests.support.slimmed import check_slimmed, compact, read, read_slimmed, rows

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
    assert rows(after) == rows(before, plan, done.spared)
    assert after.problems == before.problems
    assert removed.gone_bytes == done.gpu_code_removed > 0
    assert (removed.kernels, removed.device_functions) == (0, 0)
    assert removed.size_before == before.library.size


def test_thousands_of_regions(real_libs: Path, tmp_path: Path) -> None:
    """cuFFT has 24,000 regions of one element each; every hundredth stays."""
    before = read(real_libs / "nvidia/cu13/lib/libcufft.so.12")
    plan = plan_of(before, lambda number: number % 100 == 7)
    done = compact(before, plan, tmp_path / "lib.so")
    after, removed = read_slimmed(tmp_path / "lib.so", Scope())
    assert rows(after) == rows(before, plan, done.spared)
    assert removed.gone_bytes == done.gpu_code_removed
