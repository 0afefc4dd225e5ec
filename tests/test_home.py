"""Tests write into their own folders and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.libraries import ROOT
from tests.support.sessions import session_environ

# They run pip, the command, sessions of pytest, and code that looks up the cache's folder.
WRITING = (
    "tests/cli/test_slim.py",
    "tests/gpucode/test_cache.py",
    "tests/session/test_examples.py::test_public_kernels",
    "tests/settings/test_file.py",
)


@pytest.mark.nightly
def test_a_run_leaves_the_home_folder_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'base'}", *WRITING],
        cwd=ROOT,
        env={**session_environ(), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert list(home.rglob("*")) == []


def test_home_is_the_tests_own(home: Path, tmp_path: Path) -> None:
    code = "from pathlib import Path; print(Path.home())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == home == Path.home()
    assert tmp_path.parent in home.parents
