"""All GPU code lies in spares: every kernel comes back, and so does the original."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.spare.misses import read_misses
from tests.support.libraries import NEGATIVA
from tests.support.many import KERNELS, LIBRARIES

SCRIPT = f"""
import ctypes, json, sys
folder = sys.argv[1]
libraries = [ctypes.CDLL(f"{{folder}}/libmany{{i}}.so") for i in range({LIBRARIES})]
print(json.dumps([
    library[f"run_{{i}}_{{k}}"](0) for i, library in enumerate(libraries) for k in range({KERNELS})
]))
"""
RESULTS = [100 * i + k for i in range(LIBRARIES) for k in range(KERNELS)]


def negativa(*words: str | Path) -> str:
    done = subprocess.run(
        [NEGATIVA, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(folder: Path, logs: Path, loading: str) -> list[int]:
    environ = {**os.environ, "NEGATIVA_SPARE_LOG": str(logs), "CUDA_MODULE_LOADING": loading}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_all_code_comes_back(built: Path, tmp_path: Path, loading: str) -> None:
    folder, logs = tmp_path / "libraries", tmp_path / "logs"
    folder.mkdir()
    padding = tmp_path / "padding"
    padding.write_bytes(os.urandom(200_000))
    for library in built.glob("*.so"):
        # The libraries are small: without this, slim would leave them as they are.
        target = folder / library.name
        subprocess.run(
            ["objcopy", f"--add-section=.debug_info={padding}", library, target], check=True
        )
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    # No GPU of these tests is an sm_75, and no library has code for one.
    words = ("--arch", "sm_75", "--force-arch", "--spare", tmp_path / "spares")
    out = negativa("slim", *words, folder)
    assert out.count("slimmed") == LIBRARIES
    assert results(folder, logs, loading) == RESULTS
    misses = [read_misses(path) for path in logs.glob("*.misses")]
    assert {log.name for log in misses} == set(before)
    assert all(log.pages for log in misses)
    negativa("slim", "check", folder)
    negativa("slim", "undo", folder)
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} == before
