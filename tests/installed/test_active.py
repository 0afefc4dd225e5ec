"""The environment that a command without PATH works on."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_negativa.errors import OptionError
from pytest_negativa.installed.active import find_active


def test_the_order(tmp_path: Path) -> None:
    venv, conda, here = tmp_path / "venv", tmp_path / "conda", tmp_path / "here"
    (local := here / ".venv").mkdir(parents=True)
    environ = {"VIRTUAL_ENV": str(venv), "CONDA_PREFIX": str(conda)}
    assert find_active(environ, here, or_own=False) == ((venv,), "VIRTUAL_ENV")
    environ["VIRTUAL_ENV"] = ""
    assert find_active(environ, here, or_own=False) == ((conda,), "CONDA_PREFIX")
    assert find_active({}, here, or_own=False) == ((local,), ".venv")
    own = Path(sysconfig.get_path("purelib")).resolve()
    folders, named_by = find_active({}, tmp_path, or_own=True)
    assert own in folders and named_by == "the Python that runs negativa"


def test_one_that_is_gone_is_no_other(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    gone = tmp_path / "gone"
    assert find_active({"VIRTUAL_ENV": str(gone)}, tmp_path, or_own=True)[0] == (gone,)


def test_nothing_changes_the_environment_of_negativa_by_default(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no PATH, and no active environment"):
        find_active({}, tmp_path, or_own=False)


@pytest.mark.parametrize("name", ["uv-receipt.toml", "pipx_metadata.json"])
def test_the_environment_of_a_tool(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(OptionError, match="has negativa alone, as uv tool or pipx"):
        find_active({}, tmp_path, or_own=True)
