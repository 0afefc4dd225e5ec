"""The note on NVIDIA's terms is shown once, and remembered where the user's state lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.slimming.licence_notice import show_notice


def test_shown_once(tmp_path: Path) -> None:
    shown: list[str] = []
    for _ in range(2):
        show_notice(shown.append, tmp_path / "state")
    assert len(shown) == 1 and "NVIDIA's licence agreements" in shown[0]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_STATE_HOME": "STATE"}, "STATE/negativa"),
        ({"HOME": "STATE"}, "STATE/.local/state/negativa"),
    ],
)
def test_folder(tmp_path: Path, variables: dict[str, str], folder: str) -> None:
    run_in(tmp_path, {name: v.replace("STATE", str(tmp_path)) for name, v in variables.items()})
    assert list(Path(folder.replace("STATE", str(tmp_path))).iterdir())


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    """As that of another user, whose HOME the process has inherited."""
    shown: list[str] = []
    show_notice(shown.append, tmp_path / ("long" * 100))
    assert len(shown) == 1


def test_without_a_home(tmp_path: Path) -> None:
    """As in a container whose user has no entry in passwd: the note comes each time."""
    (tmp_path / "here").mkdir()
    gone = "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__; "
    assert "NVIDIA's" in run_in(tmp_path / "here", {}, gone)
    assert list((tmp_path / "here").iterdir()) == []


def run_in(folder: Path, variables: dict[str, str], first: str = "") -> str:
    code = "from pytest_negativa.slimming.licence_notice import show_notice; show_notice(print)"
    environment = {name: v for name, v in os.environ.items() if name != "XDG_STATE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", first + code],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
