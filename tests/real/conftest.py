"""The real libraries: installed once from the package index, then reused.

They go to ``$NEGATIVA_REAL_LIBS_DIR`` (a folder such as a ``site-packages``; what it already
has is not installed again), or else to pytest's cache folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real import PINNED, Install


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole wheels are gigabytes: only those who name the marker get them."""
    if "wheels" in config.getoption("-m"):
        return
    wheels = [item for item in items if item.get_closest_marker("wheels")]
    items[:] = [item for item in items if item not in wheels]
    config.hook.pytest_deselected(items=wheels)


@pytest.fixture(scope="session")
def install(pytestconfig: pytest.Config) -> Install:
    """Installs packages into a folder of their own, as ``site-packages`` would have them."""

    def installed(packages: dict[str, str]) -> Path:
        configured = os.environ.get("NEGATIVA_REAL_LIBS_DIR")
        if packages is PINNED and configured:
            folder = Path(configured)
        else:
            assert pytestconfig.cache is not None
            name = "real-libs" if packages is PINNED else "newest-libs"
            folder = pytestconfig.cache.mkdir(f"negativa-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        if not _missing(folder, packages):
            return folder
        # Workers of pytest-xdist each have a session: one installs, the others wait.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if missing := _missing(folder, packages):
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
                command += ["--only-binary=:all:", f"--target={folder}", *missing]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    pytest.fail(f"{' '.join(command)}\n{done.stderr}", pytrace=False)
        return folder

    return installed


@pytest.fixture(scope="session")
def real_libs(install: Install) -> Path:
    """The folder of ``PINNED``."""
    return install(PINNED)


def _missing(folder: Path, packages: dict[str, str]) -> list[str]:
    return [
        f"{name}=={version}"
        for name, version in packages.items()
        if not (folder / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD").exists()
    ]


@pytest.fixture(scope="session")
def cuobjdump(real_libs: Path) -> Path:
    return real_libs / "nvidia" / "cu13" / "bin" / "cuobjdump"


@pytest.fixture(scope="session")
def torch_cuda() -> Path:
    """``libtorch_cuda.so`` of a PyTorch that is there; 900 MB are too much to install."""
    folders = [Path(os.environ.get("NEGATIVA_REAL_LIBS_DIR", ".")) / "torch"]
    spec = importlib.util.find_spec("torch")
    if spec is not None:
        folders += map(Path, spec.submodule_search_locations or ())
    for folder in folders:
        library = folder / "lib" / "libtorch_cuda.so"
        if library.exists():
            return library
    pytest.skip("no torch with CUDA, neither importable nor in $NEGATIVA_REAL_LIBS_DIR")
