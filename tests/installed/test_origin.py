"""Which distribution brought a library, and the command that installs it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_negativa.installed.origin import Origins, reinstall_command
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.slimming import Origin
from tests.support.sites import install

LIBRARY = "pkg/libx.so"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lib/python3.12/site-packages"
    folder.mkdir(parents=True)
    install(folder, "some-thing", files=(LIBRARY,))
    return folder


@pytest.mark.parametrize(
    ("installer", "command"),
    [
        (None, "pip install --force-reinstall --no-deps some-thing==1.0"),
        ("pip\n", "pip install --force-reinstall --no-deps some-thing==1.0"),
        ("poetry 1.8", "pip install --force-reinstall --no-deps some-thing==1.0"),
        ("uv", "uv pip install --reinstall --no-deps some-thing==1.0"),
    ],
)
def test_by_installer(site: Path, installer: str | None, command: str) -> None:
    if installer is not None:
        (site / "some_thing-1.0.dist-info/INSTALLER").write_text(installer)
    origin = Origins([Site(site)]).of(site / LIBRARY)
    assert origin is not None
    assert reinstall_command(origin) == command


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"url": "file:///w/x.whl", "archive_info": {}}, "'some-thing @ file:///w/x.whl'"),
        (
            {
                "url": "https://example.com/x",
                "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"},
            },
            "'some-thing @ git+https://example.com/x@abc'",
        ),
        ({"damaged": 1}, "some-thing==1.0"),
    ],
)
def test_what_came_from_no_index(site: Path, facts: object, text: str) -> None:
    (site / "some_thing-1.0.dist-info/direct_url.json").write_text(json.dumps(facts))
    origin = Origins([Site(site)]).of(site / LIBRARY)
    assert origin is not None
    assert reinstall_command(origin) == (f"pip install --force-reinstall --no-deps {text}")


def test_conda(tmp_path: Path, site: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/history").touch()
    (tmp_path / "conda-meta/damaged.json").write_text("{")
    (tmp_path / "conda-meta/libcufft-11.json").write_text(
        json.dumps({"name": "libcufft", "version": "11.4", "files": ["lib/libcufft.so.11"]})
    )
    origins = Origins([Site(site)])
    origin = origins.of(tmp_path / "lib/libcufft.so.11")
    assert origin == Origin(name="libcufft", version="11.4", installer="conda")
    assert reinstall_command(origin) == ("conda install --force-reinstall --no-deps libcufft=11.4")
    assert origins.of(tmp_path / "lib/libother.so") is None
    # pip's, within the prefix.
    ours = origins.of(site / LIBRARY)
    assert ours is not None and ours.name == "some-thing"
