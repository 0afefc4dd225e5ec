"""Which libraries are the project's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_negativa.installed.owners import OwnLibraries


def install(site: Path, name: str, origin: object, *files: str) -> None:
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "project/.venv/lib/site-packages"
    site.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_what_lies_in_the_project_but_not_in_its_environment(tmp_path: Path, site: Path) -> None:
    own = OwnLibraries([str(tmp_path / "project")])
    assert str(tmp_path / "project/build/libours.so") in own
    assert str(site / "nvidia/libcublas.so") not in own
    assert "/usr/lib/libother.so" not in own


def test_an_editable_install_is_own_wherever_it_builds(tmp_path: Path, site: Path) -> None:
    other = tmp_path / "a checkout"
    url = {"url": other.as_uri(), "dir_info": {"editable": True}}
    install(site, "our_kernels", url, "our_kernels/_core.so")
    install(site, "theirs", {"url": other.as_uri(), "dir_info": {}}, "theirs/_core.so")
    install(site, "broken", ["no origin"], "broken/_core.so")

    own = OwnLibraries([])

    assert str(other / "build/libours.so") in own
    assert str(site / "our_kernels/_core.so") in own
    assert str(site / "theirs/_core.so") not in own
    assert str(site / "broken/_core.so") not in own


def test_an_interrupted_removal_is_no_editable_install(tmp_path: Path, site: Path) -> None:
    other = tmp_path / "a checkout"
    install(site, "gone", {"url": other.as_uri(), "dir_info": {"editable": True}})
    (site / "gone-1.0.dist-info/METADATA").unlink()
    assert str(other / "build/libours.so") not in OwnLibraries([])
