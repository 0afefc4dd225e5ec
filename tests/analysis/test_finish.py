"""What the complete trace has that the report's had not."""

from __future__ import annotations

import pytest

from pytest_negativa.analysis.report import describe_late_uses
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN
from tests.support.usages import library_usage, usage_of


@pytest.mark.planted_fault(
    "A GPU of another compute capability runs a known kernel after the report",
    says="a GPU of compute capability 8.0",
)
def test_a_gpu_that_comes_late(fault: PlantedFault) -> None:
    early, late = usage_of(devices=["9.0"]), usage_of(devices=["9.0", "8.0"])
    assert describe_late_uses(early, early) == ()
    fault.check(" ".join(describe_late_uses(early, late)))


def test_code_that_is_linked_late() -> None:
    library_map = read_library(BIN / "libmultiarch.so", Scope(devices=("9.0",)))
    early = usage_of(library_usage(library_map, {64: ["k"]}))
    late = usage_of(library_usage(library_map, {64: ["k"]}, prelinked={64: [128]}))
    assert describe_late_uses(early, late) == (f"code in {library_map.library.path}",)
