"""NVIDIA's own libraries without any code: what a process reads and calls comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.models.spans import size
from pytest_negativa.rewriting.compact.cut import cut_library
from pytest_negativa.rewriting.compact.rebuild import rebuild_original
from tests.support.cutting import needs_stub
from tests.support.symbol_places import wrong_places

pytestmark = [pytest.mark.real_libs, needs_stub]

LIBRARIES = {
    "nvidia/cu13/lib/libcufft.so.12": "cufftGetVersion",
    "nvidia/cu13/lib/libcublas.so.13": "cublasGetCudartVersion",
    "nvidia/cu13/lib/libcurand.so.10": "curandGetVersion",
    "nvidia/nccl/lib/libnccl.so.2": "ncclGetVersion",
}

# argv: the library, the original, a function. Calls the function, then compares all that is mapped
# for reading only, except for the first page: it has the ELF header.
SCRIPT = r"""
import ctypes, struct, sys
path, original, name = sys.argv[1:]
library = ctypes.CDLL(path)
number = ctypes.c_int()
status = getattr(library, name)(ctypes.byref(number))
maps = [line.split() for line in open("/proc/self/maps")]
base = min(int(row[0].split("-")[0], 16) for row in maps if row[-1] == path)
with open(original, "rb") as file:
    header = file.read(64)
    file.seek(struct.unpack_from("<Q", header, 32)[0])
    rows = file.read(56 * struct.unpack_from("<H", header, 56)[0])
    for kind, flags, offset, address, _, size, _, _ in struct.iter_unpack("<IIQQQQQQ", rows):
        if kind != 1 or flags & 2:
            continue
        first = 4096 if offset == 0 else 0
        for done in range(first, size, 1 << 20):
            length = min(1 << 20, size - done)
            file.seek(offset + done)
            assert ctypes.string_at(base + address + done, length) == file.read(length), hex(done)
print(status, number.value)
"""


@pytest.mark.parametrize("name", LIBRARIES)
def test_all_of_its_code_comes_back(real_libs: Path, tmp_path: Path, name: str) -> None:
    original, target = real_libs / name, tmp_path / Path(name).name
    cut = cut_library(original, target, tmp_path, [])
    assert size(cut.holes) > 1 << 20 and cut.size_after < cut.size_before
    assert wrong_places(original.read_bytes(), target.read_bytes()) == []
    answers = set()
    for path in (original, target):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", SCRIPT, path, original, LIBRARIES[name]],
            env={**os.environ, "LD_LIBRARY_PATH": str(original.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.add(done.stdout)
    assert len(answers) == 1
    rebuild_original(target, cut.spare, tmp_path / "original")
    assert (tmp_path / "original").read_bytes() == original.read_bytes()


@pytest.mark.parametrize("pattern", ["numpy.libs/libscipy_openblas*.so", "pyarrow/libarrow.so.*"])
def test_no_function_names_other_code(real_libs: Path, tmp_path: Path, pattern: str) -> None:
    """Thousands of functions, of which a part stays."""
    [original] = real_libs.glob(pattern)
    before = original.read_bytes()
    needed = [(at, at + 5000) for at in range(0, len(before), 1 << 20)]
    cut = cut_library(original, tmp_path / original.name, tmp_path, needed)
    assert len(cut.holes) > 20
    assert wrong_places(before, cut.library.read_bytes()) == []
