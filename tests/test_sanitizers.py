"""The parts in C under AddressSanitizer and UndefinedBehaviorSanitizer.

An auditor is loaded before any sanitizer's runtime could be. So in flows that audit, undefined
behaviour traps, and bad accesses are looked for by hostile inputs to the same functions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.compiling import CC, needs_compiler
from tests.support.libraries import ROOT, SUPPORT

PARTS = {
    "injection": "../tests/support/injection.c",
    "redirect": "processes/redirect.c",
    "first_result": "measuring/first_result.c",
    "search": "gpucode/search.c",
    "pages": "pages/watch.c",
    "holes": "pages/watch.c",
}
COMMON = ("-std=gnu11", "-g", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TRAPS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")

pytestmark = [needs_compiler, pytest.mark.slow]


def compile_part(part: str, target: Path, flags: Sequence[str]) -> Path:
    source = ROOT / "pytest_negativa" / PARTS[part]
    options = [*COMMON, *flags, "-ldl", "-lpthread"]
    subprocess.run([CC or "cc", "-o", str(target), str(source), *options], check=True)
    return target


@pytest.fixture(scope="session")
def runtimes() -> str:
    """For LD_PRELOAD: the runtimes must come before all other libraries."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [CC or "cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        if not Path(found).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        paths.append(found)
    return ":".join(paths)


def environ(runtimes: str) -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": runtimes,
        # Python itself leaks. The exit status is one that no test expects.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=97",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=97",
    }


@pytest.mark.parametrize(
    ("part", "inputs"),
    [
        ("injection", 40),
        ("redirect", 300),
        ("first_result", 50),
        ("search", 50),
        ("pages", 300),
        ("holes", 300),
    ],
)
def test_hostile_inputs(tmp_path: Path, runtimes: str, part: str, inputs: int) -> None:
    library = compile_part(part, tmp_path / "part.so", SANITIZERS)
    script = str(SUPPORT / "hostile.py")
    done = subprocess.run(
        [sys.executable, script, part, str(library), str(tmp_path), "0", str(inputs)],
        check=False,
        capture_output=True,
        text=True,
        env=environ(runtimes),
    )
    assert done.returncode == 0, done.stderr[-5000:]


def copy_project(target: Path) -> Path:
    """The package and its tests, for a build of their own."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", ".negativa")
    for name in ("pytest_negativa", "tests", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, target)
    for library in (ROOT / "tests").rglob("*.so"):
        shutil.copy(library, target / library.relative_to(ROOT))
    return target


def run_tests(project: Path, *tests: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        check=False,
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project), **variables},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.nightly
def test_traced_children(tmp_path: Path, runtimes: str) -> None:
    """The flows of the native tracer, in a Python with the sanitizers' runtimes."""
    project = copy_project(tmp_path / "project")
    compile_part("injection", project / "pytest_negativa/tracing/_injection.so", SANITIZERS)
    run_tests(
        project,
        "tests/tracing/test_detectors.py",
        "tests/tracing/test_injection.py",
        # The copy of the library lies in a folder of this user's.
        "--deselect=tests/tracing/test_injection.py::test_another_user",
        CFLAGS=" ".join(SANITIZERS),
        **{k: v for k, v in environ(runtimes).items() if k not in os.environ},
    )


def test_auditors(tmp_path: Path) -> None:
    """The flows of the redirect and of the time to the first result."""
    project = copy_project(tmp_path / "project")
    compile_part("redirect", project / "pytest_negativa/processes/_redirect.so", TRAPS)
    compile_part("first_result", project / "pytest_negativa/measuring/_first_result.so", TRAPS)
    run_tests(project, "tests/processes/test_redirect.py", "tests/measuring/test_first_result.py")
