"""Locks of folders: who is waited for, and who can't hold anybody up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_negativa.slimming.folder_locks import hold
from tests.support.faults import PlantedFault

HOLDER = """
import fcntl, os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX)
os.setuid(1234)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A process of another user holds a folder."""
    command = [sys.executable, "-I", "-c", HOLDER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        yield
        holder.kill()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder to slim."""
    root = tmp_path / "open" / "site"
    root.mkdir(parents=True)
    return root


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of others")
@pytest.mark.parametrize("which", ["parent", "itself"])
@pytest.mark.planted_fault(
    "another user locks the folder above the one that is slimmed, and never unlocks it",
    says="of another user has locked",
)
def test_a_lock_of_another_user_holds_nothing_up(
    root: Path, which: str, fault: PlantedFault, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(root.parent if which == "parent" else root), hold(root):
        pass
    fault.check(capsys.readouterr().err)
