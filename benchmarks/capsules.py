"""Bytes that stay of libraries for sm_100 with one used kernel in each region; those of capsules.

From sm_100 on, cubins stay whole at kernel granularity, for NVIDIA's linker crashes on others: see
docs/explanation/limits.md. This trims them all the same, and adds up what they would have.

Run in a clone: python -m benchmarks.capsules LIBRARY ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Scope
from pytest_negativa.planning import decide
from pytest_negativa.rewriting import cubin_code
from pytest_negativa.rewriting.plan_edits import trim_kernels
from tests.real.test_kernels import plan_of_first_kernels


def main() -> None:
    """Print a line for each library, and the sum."""
    decide._FIRST_MAJOR_WITH_CAPSULES = cubin_code._CAPSULE_TYPE = 1 << 32
    sums = [0, 0, 0, 0]
    for path in map(Path, sys.argv[1:]):
        library_map = read_library(path, Scope(devices=("10.0",)))
        plan = plan_of_first_kernels(library_map, ComputeCapability(10, 0))
        with ByteSource(path) as source:
            _, cubins = trim_kernels(source, library_map, plan, 1)
        found = (
            sum(decision.size for decision in plan.decisions if decision.kept),
            len(cubins),
            sum(cubin.stored_before for cubin in cubins),
            sum(cubin.stored_after for cubin in cubins),
        )
        sums = [a + b for a, b in zip(sums, found, strict=True)]
        _show(path.name, *found)
    _show("sum", *sums)


def _show(name: str, kept: int, count: int, before: int, after: int) -> None:
    print(
        f"{name:22} {kept / 1e6:6.1f} MB kept, of these {count:4} cubins with "
        f"{before / 1e6:6.1f} MB, which would have {after / 1e6:6.1f}"
    )


if __name__ == "__main__":
    main()
