"""What the driver of a process tells of its context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compile_shared, needs_compiler

ASK = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from pytest_negativa.session.cuda_context import lost_context
print(lost_context())
"""
CURRENT = "int cuCtxGetCurrent(void **context) { *context = 0; return 0; }"
COUNT = "int cuDeviceGetCount(int *count) { *count = 1; return 0; }"
LOST = """int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *active = (int)(*flags = 0u * (unsigned)device);
    return 700;
}"""


@needs_compiler
@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ((), "None"),
        ((CURRENT, COUNT), "None"),
        ((CURRENT, COUNT, LOST), "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
)
def test_a_stub_of_the_driver(tmp_path: Path, functions: tuple[str, ...], answer: str) -> None:
    source = tmp_path / "stub.c"
    source.write_text("\n".join(("int unused;", *functions)))
    stub = compile_shared(str(source), tmp_path / "libcuda.so.1")
    command = [sys.executable, "-c", ASK, str(stub)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{answer}\n"
