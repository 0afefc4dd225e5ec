"""Cubin files in the style of flashinfer-cubin: opened in three ways, proved, and removed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.libraries import NEGATIVA
from tests.support.sites import make_wheel, pip_install

WAYS = ("path", "library", "memory")
COUNT = 12
"""Cubins of the distribution; the tests open three of them."""

SUITE = """
import ctypes, os
from pathlib import Path
import pytest

HERE = Path(__file__).parent
CUBINS = Path(os.environ["SITE"]) / "some_cubins" / "cubins"
CUDA = ctypes.CDLL("libcuda.so.1")


def check(status):
    assert status == 0, status


def launch(function):
    check(CUDA.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    check(CUDA.cuCtxSynchronize())


@pytest.fixture(scope="module", autouse=True)
def context():
    # The runtime makes the primary context current.
    assert ctypes.CDLL(str(HERE / "libmany0.so")).run_0_0(0) == 0


def of_module(module, name):
    function = ctypes.c_void_p()
    check(CUDA.cuModuleGetFunction(ctypes.byref(function), module, name))
    return function


def test_path():
    module = ctypes.c_void_p()
    check(CUDA.cuModuleLoad(ctypes.byref(module), os.fsencode(CUBINS / "path.cubin")))
    launch(of_module(module, b"kernel_path"))


def test_library():
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    path = os.fsencode(CUBINS / "library.cubin")
    arguments = (None, None, 0, None, None, 0)
    check(CUDA.cuLibraryLoadFromFile(ctypes.byref(library), path, *arguments))
    check(CUDA.cuLibraryGetKernel(ctypes.byref(kernel), library, b"kernel_library"))
    launch(kernel)


def test_memory():
    module, data = ctypes.c_void_p(), (CUBINS / "memory.cubin").read_bytes()
    check(CUDA.cuModuleLoadData(ctypes.byref(module), data))
    launch(of_module(module, b"kernel_memory"))
"""


def compile_cubin(folder: Path, name: str, arch: int) -> Path:
    source, target = folder / f"{name}.cu", folder / f"{name}.cubin"
    source.write_text(f'extern "C" __global__ void kernel_{name}() {{}}\n')
    command = ["nvcc", "-cubin", f"-arch=sm_{arch}", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_unused_cubin_files_are_proved_and_removed(built: Path, tmp_path: Path) -> None:
    names = [*WAYS, *(f"idle{number}" for number in range(COUNT - len(WAYS)))]
    archs = [90 if number % 4 else 100 for number in range(len(names))]
    archs[: len(WAYS)] = [90] * len(WAYS)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda n, a: compile_cubin(tmp_path, n, a), names, archs))
    files = {f"some_cubins/cubins/{path.name}": path for path in cubins}
    site = tmp_path / "site"
    pip_install(site, make_wheel(tmp_path, "some-cubins", "1.0", files))
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(built / "libmany0.so", project)
    (project / "test_a.py").write_text(SUITE)
    (project / "pytest.ini").write_text("[pytest]\n")
    # Other programs that trace on this machine open it while the copies are run.
    (project / "negativa.yaml").write_text('libraries:\n  exclude: ["libcupti.so*"]\n')
    environ = {**os.environ, "SITE": str(site)}
    environ["PYTHONPATH"] = f"{site}{os.pathsep}{environ.get('PYTHONPATH', '')}"

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=project, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(*pytest, "--negativa")
    assert "\nPROVED" in run(*pytest, "--negativa-verify")
    rows = json.loads((project / ".negativa/latest/verdict.json").read_text())["libraries"]
    # Other packages of the environment may have such files, too.
    [row] = [row for row in rows if row["path"].endswith("/some-cubins (files)")]
    assert (row["status"], row["unused_elements"]) == ("proved", COUNT - len(WAYS))
    run(NEGATIVA, "lock")
    copy = tmp_path / "slimmed"
    shutil.copytree(site, copy)
    run(NEGATIVA, "slim", "--no-way-back", "--lock", "negativa.lock", copy)
    assert {path.stem for path in copy.rglob("*.cubin")} == set(WAYS)
    # The tests pass on what is left.
    environ["SITE"] = str(copy)
    run(*pytest)
    by_arch = tmp_path / "by_arch"
    shutil.copytree(site, by_arch)
    run(NEGATIVA, "slim", "--no-way-back", "--arch", "sm_90", by_arch)
    kept = {name for name, arch in zip(names, archs, strict=True) if arch == 90}
    assert {path.stem for path in by_arch.rglob("*.cubin")} == kept
