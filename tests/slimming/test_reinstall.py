"""Which distribution brought a library, and the command that installs it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_negativa.slimming.tree import scan_folder
from tests.support.sites import install

LIBRARY = "pkg/libx.so"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lib/python3.12/site-packages"
    folder.mkdir(parents=True)
    install(folder, "some-thing", files=(LIBRARY,))
    return folder


def test_a_distribution_of_an_index(site: Path) -> None:
    advice = scan_folder(site).how_to_reinstall(LIBRARY)
    assert advice == "install it again: pip install --force-reinstall --no-deps some-thing==1.0"


def test_a_distribution_that_uv_installed(site: Path) -> None:
    (site / "some_thing-1.0.dist-info/INSTALLER").write_text("uv\n")
    advice = scan_folder(site).how_to_reinstall(LIBRARY)
    assert advice == "install it again: uv pip install --reinstall --no-deps some-thing==1.0"


def test_what_came_from_no_index(site: Path) -> None:
    (site / "some_thing-1.0.dist-info/direct_url.json").write_text("{}")
    assert scan_folder(site).how_to_reinstall(LIBRARY) == "install it again"


def test_conda(tmp_path: Path, site: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/history").touch()
    (tmp_path / "conda-meta/damaged.json").write_text("{")
    (tmp_path / "conda-meta/libcufft-11.json").write_text(
        json.dumps({"name": "libcufft", "version": "11.4", "files": ["lib/libcufft.so.11"]})
    )
    tree = scan_folder(tmp_path)
    advice = tree.how_to_reinstall("lib/libcufft.so.11")
    assert advice == "install it again: conda install --force-reinstall --no-deps libcufft=11.4"
    assert tree.how_to_reinstall("lib/libother.so") == "install it again"
    # pip's, within the prefix.
    assert "pip install" in tree.how_to_reinstall(f"{site.relative_to(tmp_path)}/{LIBRARY}")
