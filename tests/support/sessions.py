"""Sessions of pytest and runs of the command in a folder of their own, as a user starts them.

There is no GPU in any of them, not even where the machine has one: they replay what
``tests/fixtures/quickstart`` recorded on an H200.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import recording_environ
from tests.support.libraries import NEGATIVA, NO_FIXTURES, QUICKSTART, QUICKSTART_LIBRARY

RECORDING = QUICKSTART / "recorded" / "h200.jsonl"

NO_GPU_LINE = (
    "No GPU: replaying the trace recorded on NVIDIA H200 (compute capability 9.0), 2026-11-21; "
    "nothing is proved here."
)
PROVE_EACH = (
    "Next: pytest --negativa-verify for each run that is not proved, then negativa combine\n"
)
HEADLINE = "60.2 kB of 67.2 kB GPU code (89.6%) in 1 library is unused on NVIDIA H200 (9.0)."

# libquickstart.so has four regions of seven elements; an H200 loads the fourth of each.
LOADED = ((18288, 20008), (32936, 35336), (54288, 57152))
NOT_LOADED = (72856, 75224)
# The kernels that the recording of the quickstart uses, and the test that used each first.
FIRST_USES = {
    "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii": "tests/test_matrices.py::test_multiply[1-1-1]",
    "statistics_weighted_sum": "tests/test_statistics.py::test_sum_with_default_weights[1]",
    "vector_add": "tests/test_vectors.py::test_add[1]",
    "vector_scale": "tests/test_vectors.py::test_scale[0.0]",
}
KERNELS = tuple(FIRST_USES)

# On a loaded machine, a search of a dozen rounds with workers takes more than two minutes.
_HANGS_S = 900

Done = subprocess.CompletedProcess[str]


def session_environ() -> dict[str, str]:
    """This process's environment without what steers its own session."""
    foreign = ("NEGATIVA", "PYTEST_", "CUDA_", "COV_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def unmeasured_environ() -> dict[str, str]:
    """This process's environment without coverage's measurement.

    A process that may write nothing can't write what coverage has measured either, and says so.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def import_path(folder: Path) -> str:
    """``PYTHONPATH`` for sessions that load modules of ``folder`` with ``-p``."""
    already = os.environ.get("PYTHONPATH")
    return f"{folder}{os.pathsep}{already}" if already else str(folder)


def skip_unsupported(output: str) -> None:
    """Skip the test if a session's output says that this machine can't do what it tests."""
    if f"it was not tested on {platform.machine()}" in output:
        pytest.skip(f"nothing is proved on {platform.machine()}")
    if platform.machine() != "x86_64" and "libquickstart.so: cannot open" in output:
        pytest.skip(NO_FIXTURES)


class Project:
    """A project's folder and what is run in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.environ = {
            **session_environ(),
            "CUDA_VISIBLE_DEVICES": "",
            "NEGATIVA_CACHE_DIR": str(cache),
            # Else the session removes what other sessions left, however large that is.
            "PYTEST_DEBUG_TEMPROOT": str(folder.parent),
            # Not needed by any test here, and a fifth of each session's time.
            # A test that needs one of them loads it with -p. pytest-randomly shuffles tests, so one
            # worker may get all that use the GPU.
            "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:hypothesispytest -p no:rerunfailures "
            "-p no:flaky -p no:randomly",
        }

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat().st_mtime if path.exists() else 0
        path.write_text(text)
        # By second and size, Python tells whether it has the bytecode of this text.
        if path.stat().st_mtime < before + 2:
            os.utime(path, (before + 2, before + 2))
        return path

    def start(self, *command: str | os.PathLike[str], **environ: str) -> subprocess.Popen[str]:
        env = {**self.environ, **environ}
        return subprocess.Popen(
            [os.fspath(word) for word in command],
            cwd=self.folder,
            env={**env, **recording_environ(self.folder, env.get("PYTHONPATH"))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        *command: str | os.PathLike[str],
        status: int = 0,
        **environ: str,
    ) -> Done:
        started = self.start(*command, **environ)
        try:
            out, err = started.communicate(timeout=_HANGS_S)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
        skip_unsupported(out + err)
        assert started.returncode == status, out + err
        return Done(command, started.returncode, out, err)

    def pytest(self, *arguments: str, status: int = 0, **environ: str) -> Done:
        """A session; ``status`` is the exit code that it must have."""
        return self.run(sys.executable, "-m", "pytest", *arguments, status=status, **environ)

    def negativa(self, *arguments: str | os.PathLike[str], status: int = 0, **environ: str) -> Done:
        """The command ``negativa``."""
        return self.run(NEGATIVA, *arguments, status=status, **environ)

    @property
    def results(self) -> Path:
        return self.folder / ".negativa"

    def runs(self) -> list[Path]:
        """The folders of all runs."""
        if not self.results.is_dir():
            return []
        return sorted(p for p in self.results.iterdir() if p.is_dir() and not p.is_symlink())

    def latest(self, name: str) -> Any:
        """A file of the latest run."""
        return json.loads((self.results / "latest" / name).read_text())

    def plan(self, library: str = "libquickstart.so") -> list[Any]:
        """The decisions for a library: [start, end, kept, reason, why]."""
        found: list[Any] = self.latest(f"plan/{library}.json")["decisions"]
        return found

    def planned(self) -> bool:
        """Whether the latest run has any plan or span."""
        return any((self.results / "latest" / name).exists() for name in ("plan", "spans"))


def copy_quickstart(target: Path) -> Path:
    """The tests' own project as a clone of the repository has it."""
    return copy_project(QUICKSTART, target)


def copy_project(source: Path, target: Path) -> Path:
    """A project as a clone of the repository has it."""
    ignored = shutil.ignore_patterns(".negativa", ".pytest_cache", "__pycache__")
    shutil.copytree(source, target, ignore=ignored)
    return target


def copy_library(target: Path) -> Path:
    """Only the library and the recording, for suites of the tests' own."""
    (target / "quickstart").mkdir(parents=True)
    shutil.copy(QUICKSTART_LIBRARY, target / "quickstart")
    (target / "recorded").mkdir()
    shutil.copy(RECORDING, target / "recorded")
    (target / "pytest.ini").write_text("[pytest]\n")
    (target / "negativa.yaml").write_text("trace: {replay: recorded}\n")
    return target


def used_kernels(usage: Any) -> set[str]:
    """Names of the kernels in a ``usage.json``."""
    return {
        kernel
        for library in usage["libraries"]
        for image in library["images"]
        for kernel in image["kernels"]
    }
