"""Metadata that another user changes while they are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_READ = """
import os, sys
from pytest_negativa.installed.distributions import find_distributions, named_metadata

(found,) = find_distributions([sys.argv[1]])
assert named_metadata(found)
path = sys.argv[1] + "/thing-1.dist-info/METADATA"
os.unlink(path)
os.mkfifo(path)
print(found.read_text("METADATA"), named_metadata(found) is not None)
"""


def test_a_pipe_that_takes_the_place_of_a_file(tmp_path: Path) -> None:
    """Root that looks at another user's folder never waits for that user."""
    (tmp_path / "thing-1.dist-info").mkdir()
    (tmp_path / "thing-1.dist-info/METADATA").write_text("Name: thing\nVersion: 1\n")
    # In a process of its own: one that waits could not be ended.
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None False\n"
