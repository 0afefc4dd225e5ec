"""GPU tests: skipped without a GPU; with ``--require-gpu`` that is a failure instead."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from pytest_negativa.devices import has_gpu
from tests.support.many import build_many


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


# Before fixtures of a wider scope compile and trace.
@pytest.fixture(scope="session", autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    if has_gpu():
        return
    # The option is defined in tests/conftest.py, which a run of this folder alone loads too.
    if request.config.getoption("--require-gpu", default=False):
        pytest.fail("no NVIDIA GPU here, and --require-gpu was given")
    pytest.skip("no NVIDIA GPU here")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries with a region for each kernel, for two archs and as PTX."""
    if shutil.which("nvcc") is None:
        pytest.fail("nvcc is not on PATH: the libraries to verify can't be built")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "many"
    with (shared / "many.lock").open("w") as lock:
        # The first worker compiles for all.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = shared / "many.part"
            partial.mkdir(exist_ok=True)
            build_many(partial)
            partial.rename(folder)
    return folder
