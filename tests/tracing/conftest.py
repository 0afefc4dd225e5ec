"""Fixtures of the tests whose processes the native library traces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.compiling import compile_shared


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the driver and CUPTI, compiled."""
    return compile_shared("driver.c", tmp_path_factory.mktemp("driver") / "libcuda.so.1")


@pytest.fixture(scope="session")
def cupti(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, under CUPTI's name; loaded, it is the driver, too, by its soname."""
    return Path(shutil.copy(driver, tmp_path_factory.mktemp("cupti") / "libcupti.so.13"))
