"""pytest --negativa-measure: a session's own command, measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_negativa.processes.redirect import copy_path, why_unsupported
from tests.support.compiling import compile_shared, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported())),
]

TESTS = """
import ctypes, os, sys

def test_library():
    assert ctypes.CDLL({library!r}).value() in (1, 2)
    assert "pytest_negativa.session.traced_process" not in sys.modules

def test_own_result():
    assert os.environ.get("RESULT") != "bad"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path.resolve()
    library = folder / "lib" / "libvalue.so"
    compile_shared("value.c", library, "-DVALUE=1", "-DSIZE=2000000")
    copy = Path(copy_path(folder / ".negativa" / "reconstructed", library))
    compile_shared("value.c", copy, "-DVALUE=2", "-DSIZE=1000")
    (folder / "test_it.py").write_text(TESTS.format(library=str(library)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def run(
    project: Path, *arguments: str, environ: Mapping[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def measurement(project: Path) -> dict[str, object]:
    (path,) = (project / ".negativa" / "measure").glob("*/measurement.json")
    found: dict[str, object] = json.loads(path.read_bytes())
    return found


@pytest.mark.slow
def test_the_session_is_measured(project: Path) -> None:
    done = run(project, "-v", "--negativa", "--negativa-measure")
    assert "original against slim, 1 library, 5 pairs of runs" in done.stdout
    assert done.stderr.endswith("Next: negativa lock\n")
    found = measurement(project)
    runs = found["runs"]
    assert isinstance(runs, list)
    assert {(r["variant"], r["copies"]) for r in runs} == {("original", 0), ("slim", 1)}
    assert {r["status"] for r in runs} == {0}
    (log, *_) = (project / ".negativa" / "measure").glob("*/*-1-slim.log")
    assert "2 passed" in log.read_text()


def test_without_slim_libraries(project: Path) -> None:
    (project / ".negativa" / "reconstructed").rename(project / "elsewhere")
    done = run(project, "--negativa-measure", status=4)
    assert "reconstructed: no slim libraries here; make some with pytest --neg" in done.stderr
    named = set(re.findall(r"--[a-z-]+", done.stderr))
    assert named == {"--negativa", "--negativa-verify"}
