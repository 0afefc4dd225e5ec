"""All GPU code lies in spares: every kernel comes back, and so does the original."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from pytest_negativa.pages.page_logs import read_misses
from tests.support.cutting import logged
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
CORPUS = Path(__file__).parent / "corpus"
# Makes the module larger than what is worth a hole.
TABLE = 'extern "C" __device__ int table[1 << 15] = {1};\n'
RESULTS = [100 * i + k for i in range(LIBRARIES) for k in range(KERNELS)]


def negativa(*words: str | Path) -> str:
    done = subprocess.run(
        [NEGATIVA, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(folder: Path, logs: Path | None, loading: str) -> list[int]:
    environ = {**os.environ, "CUDA_MODULE_LOADING": loading}
    if logs is not None:
        environ |= logged(logs)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


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
    before = digests(folder)
    # No GPU of these tests is an sm_75, and no library has code for one.
    words = ("--arch", "sm_75", "--force-arch", "--spare", tmp_path / "spares")
    out = negativa("slim", *words, folder)
    assert out.count("slimmed") == LIBRARIES
    assert results(folder, None, loading) == RESULTS
    assert results(folder, logs, loading) == RESULTS
    misses = read_misses([logs])
    assert {log.name for log in misses} == set(before)
    assert all(log.pages for log in misses)
    negativa("slim", "check", folder)
    negativa("slim", "undo", folder)
    assert digests(folder) == before


def compile_with_data(program: str, folder: Path, library: Path) -> None:
    """Build a program of the corpus whose module lies in data that can be written to."""
    sources = folder / "src"
    shutil.copytree(CORPUS, sources)
    (sources / "module.cu").write_text((sources / "module.cu").read_text() + TABLE)
    image = (sources / "module.S").read_text()
    assert ".section .rodata\n" in image
    # As cuFFT has it.
    writable = image.replace(".section .rodata", '.section .ldata, "awl", @progbits')
    (sources / "module.S").write_text(writable)
    shared = ["nvcc", "-shared", "-std=c++17", "-Xcompiler=-fPIC", "-arch=native"]
    commands: list[list[str | Path]] = [
        ["nvcc", "-fatbin", "--no-compress", "-arch=sm_90", "module.cu", "-o", "module.fatbin"],
        ["cc", "-c", "module.S", "-o", "module.o"],
        ["cc", "host.c", "-o", folder / "host", "-ldl"],
        [*shared, f"{program}.cu", "idle.cu", "module.o", "-o", library],
    ]
    for command in commands:
        subprocess.run(command, cwd=sources, check=True)


@pytest.mark.parametrize("program", ["driver", "library"])
def test_code_in_data_that_programs_write_to_comes_back(program: str, tmp_path: Path) -> None:
    folder = tmp_path / "libraries"
    folder.mkdir()
    library = folder / "libdata.so"
    compile_with_data(program, tmp_path, library)
    with library.open("rb") as file:
        data = ELFFile(file).get_section_by_name(".ldata")
        assert data is not None
        section = range(data["sh_offset"], data["sh_offset"] + data["sh_size"])
    before = digests(folder)
    words = ("--arch", "sm_75", "--force-arch", "--spare", tmp_path / "spares")
    assert "libdata.so: slimmed, keeps no code for sm_75" in negativa("slim", *words, folder)
    command: list[str | Path] = [tmp_path / "host", "2", library]
    for loading in ("LAZY", "EAGER"):
        logs = tmp_path / loading
        environ = {**logged(logs), "CUDA_MODULE_LOADING": loading}
        # Twice: the pages that came back stay.
        for more in ({"CUDA_MODULE_LOADING": loading}, environ):
            subprocess.run(command, env={**os.environ, **more}, check=True, timeout=300)
        [log] = read_misses([logs])
        assert any(miss.first in section for miss in log.pages.values())
    negativa("slim", "undo", folder)
    assert digests(folder) == before
