"""Tests write into their own folders and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_home_is_the_tests_own(home: Path, tmp_path: Path) -> None:
    code = "from pathlib import Path; print(Path.home())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == home == Path.home()
    assert tmp_path.parent in home.parents
