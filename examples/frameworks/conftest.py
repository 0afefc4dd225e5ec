"""Skips everything where the driver sees no GPU; each file skips itself without its framework."""

from __future__ import annotations

import ctypes
import os

import pytest

# JAX would take most of the GPU's memory for itself, and these suites may run in one process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def gpu_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not gpu_count():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
