"""Libraries with many regions of GPU code, compiled from tests/gpu/many.cu."""

from __future__ import annotations

import concurrent.futures
import itertools
import subprocess
from pathlib import Path

from tests.support.libraries import TESTS

LIBRARIES = 5
KERNELS = 5
"""Kernels that tests call, of each library; every one is in a region of its own."""

_SOURCE = TESTS / "gpu" / "many.cu"


def build_many(folder: Path) -> None:
    """Compile the libraries, with a region for each kernel, for two archs and as PTX."""
    archs = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
    archs += ["-gencode=arch=compute_90,code=compute_90", "-Xcompiler=-fPIC"]

    def compile_one(name: tuple[int, int]) -> str:
        library, kernel = name
        target = folder / f"{library}_{kernel}.o"
        defines = [f"-DNAME={library}_{kernel}", f"-DVALUE={100 * library + kernel}"]
        command = ["nvcc", "-c", *archs, *defines, str(_SOURCE), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return str(target)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, itertools.product(range(LIBRARIES), range(KERNELS))))
    for library in range(LIBRARIES):
        own = objects[library * KERNELS : (library + 1) * KERNELS]
        target = folder / f"libmany{library}.so"
        subprocess.run(["nvcc", "-shared", *own, "-o", str(target)], check=True)
