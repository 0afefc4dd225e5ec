"""nvidia-ml-py on a library that stands in for NVML, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiling import compile_shared, needs_compiler

GIB = 1 << 30

CODE = """
import json, sys
from pytest_negativa.measuring.sampler import GpuPeaks, Gpus
gpus = Gpus()
peaks = GpuPeaks(gpus)
peaks.sample({77, 78})
print(json.dumps({
    "names": gpus.names, "missing": gpus.missing, "used": gpus.used_bytes(),
    "of_processes": peaks.of_processes, "on_devices": peaks.on_devices,
    "energy": peaks.energy_mj(),
}))
"""


def ask(environ: dict[str, str], *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *options, "-c", CODE],
        env={**os.environ, **environ}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("pynvml")
    library = compile_shared("libnvidia-ml.c", tmp_path / "libnvidia-ml.so.1")
    return {"LD_LIBRARY_PATH": str(library.parent)}


@needs_compiler
def test_processes_are_found_by_id(environ: dict[str, str]) -> None:
    found = ask({**environ, "NVML_PID": "77"})
    assert found["names"] == ["first", "second"] and found["missing"] is None
    assert found["used"] == 3 * GIB
    assert found["of_processes"] == GIB // 4
    # Nothing but the difference to the time before counts.
    assert found["on_devices"] == 0
    # Two devices, each asked twice.
    assert found["energy"] == 10 * (2 + 3 - 0 - 1)


@needs_compiler
@pytest.mark.parametrize("pid", ["76", ""])
def test_processes_under_other_ids(environ: dict[str, str], pid: str) -> None:
    found = ask({**environ, **({"NVML_PID": pid} if pid else {})})
    assert found["of_processes"] is None
    assert found["on_devices"] == 0


NOTHING: dict[str, Any] = {
    "names": [], "used": None, "of_processes": None, "on_devices": None, "energy": None,
}  # fmt: skip


def test_without_nvml(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    # An empty file is found first, and can't be loaded.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    found = ask({"LD_LIBRARY_PATH": str(tmp_path)})
    assert found.pop("missing").startswith("GPU memory and energy are not measured: NVML: ")
    assert found == NOTHING


def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    found = ask({"PYTHONPATH": str(tmp_path)})
    assert "pip install 'pytest-negativa[measure]'" in found.pop("missing")
    assert found == NOTHING
