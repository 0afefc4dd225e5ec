"""Which distribution brought a library, and the command that installs it again."""

from __future__ import annotations

import json
import shlex
import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_negativa.installed.origin import Origins, reinstall_commands
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
    assert reinstall_commands([(site / LIBRARY, origin)]) == (command,)


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
    assert reinstall_commands([(site / LIBRARY, origin)]) == (
        f"pip install --force-reinstall --no-deps {text}",
    )


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
    assert reinstall_commands([(tmp_path / "lib/libcufft.so.11", origin)]) == (
        f"conda install --prefix {tmp_path} --force-reinstall --no-deps libcufft=11.4",
    )
    assert origins.of(tmp_path / "lib/libother.so") is None
    # pip's, within the prefix.
    ours = origins.of(site / LIBRARY)
    assert ours is not None and ours.name == "some-thing"


def test_one_command_for_each_installer_and_environment(tmp_path: Path) -> None:
    """Each names the interpreter of its environment, if there is one, in a shell's words."""
    one, two = (Origin(name=name, version="1+cu130", installer="pip") for name in "ba")
    other = Origin(name="c", version="2", installer="uv")
    place, venv = tmp_path / "folder/lib.so", tmp_path / "an environment"
    library = venv / "lib/python3.12/site-packages/lib.so"
    python = venv / "bin/python3.12"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    own = Path(sysconfig.get_path("platlib"), "lib.so").resolve()
    files = [(path, origin) for path in (place, library, own) for origin in (one, other, two, one)]
    commands = reinstall_commands(files)
    assert commands[0] == "pip install --force-reinstall --no-deps a==1+cu130 b==1+cu130"
    assert "uv pip install --reinstall --no-deps c==2" in commands
    assert len(commands) == 6
    words = [shlex.split(command) for command in commands]
    again = ["install", "--force-reinstall", "--no-deps", "a==1+cu130", "b==1+cu130"]
    assert [str(python), "-m", "pip", *again] in words
    assert [
        "uv",
        "pip",
        "install",
        "--python",
        str(python),
        "--reinstall",
        *again[2:3],
        "c==2",
    ] in words
    ours = next(w[0] for w in words if w[1:3] == ["-m", "pip"] and w[0] != str(python))
    assert Path(ours).samefile(sys.executable)
