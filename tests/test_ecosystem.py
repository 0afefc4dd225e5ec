"""What other tools run of us: a GitHub action, hooks of pre-commit, a repair of cibuildwheel."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.libraries import DOCS, MULTIARCH, QUICKSTART_LIBRARY, ROOT
from tests.support.made_site import ONE, Made
from tests.support.sites import make_wheel

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
BIN = Path(sys.executable).parent


def environ(**added: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("NEGATIVA", "PYTEST_"))}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept['PATH']}", **added}


class Runner:
    """Plays the steps of a composite action, as GitHub's runner does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = folder / "summary.md"
        self.path = folder / "path"
        self.output = ""
        self.ran: list[str] = []

    def play(self, inputs: Mapping[str, str], *, install: bool = False) -> int:
        """Run the steps until one fails, and return the last exit status.

        Args:
            inputs: of the action.
            install: run the first step, too; else this environment's commands are used.
        """
        values = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}
        values |= inputs
        self.path.touch()
        for step in ACTION["runs"]["steps"][0 if install else 1 :]:
            wanted = re.fullmatch(r"inputs\.([\w-]+) != ''", step.get("if", "inputs.path != ''"))
            assert wanted is not None and step["shell"] == "bash"
            if values[wanted[1]] and (status := self._run(step, values)):
                return status
        return 0

    def _run(self, step: Mapping[str, Any], values: Mapping[str, str]) -> int:
        added = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)
            for name, text in step.get("env", {}).items()
        }
        given = environ(
            RUNNER_TEMP=str(self.folder),
            GITHUB_ACTION_PATH=str(ROOT),
            GITHUB_PATH=str(self.path),
            GITHUB_STEP_SUMMARY=str(self.summary),
            **added,
        )
        given["PATH"] = os.pathsep.join((*self.path.read_text().split(), given["PATH"]))
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.output += done.stdout
        self.ran.append(step["name"])
        return done.returncode


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.mark.slow
def test_the_action_gates_and_compares(runner: Runner) -> None:
    for side, library in (("old", QUICKSTART_LIBRARY), ("new", MULTIARCH)):
        (runner.folder / side).mkdir()
        # Its name would end a fenced block.
        shutil.copy(library, runner.folder / side / "```lib.so")
    gates = {"require-arch": "sm_80,sm_90", "arch": "sm_80,sm_90", "max-dead": "90%"}
    assert runner.play({"path": "new", "base": "old", **gates}) == 0, runner.output
    assert len(runner.ran) == 3
    comment = (runner.folder / "negativa-comment.md").read_text()
    assert comment.startswith("### GPU code\n\n    GPU code of new, compared with old: ")
    assert all(line[:4].isspace() for line in comment.splitlines()[2:] if line)
    summary = runner.summary.read_text()
    assert summary.startswith(comment)
    assert "    " in summary.removeprefix(comment)

    assert runner.play({"path": "new", "require-arch": "sm_60"}) == 1
    assert runner.play({"path": "new", "arch": "sm_90", "max-dead": "0%"}) == 1
    assert runner.play({"path": "absent", "base": "old"}) == 2
    # Values of inputs are no code.
    runner.play({"path": "$(touch evil); touch evil", "require-arch": "`touch evil`"})
    assert not (runner.folder / "evil").exists()


@pytest.mark.real_libs
def test_the_action_installs_itself(runner: Runner) -> None:
    assert runner.play({"path": str(MULTIARCH), "require-arch": "sm_80"}, install=True) == 0
    assert runner.ran == ["Install pytest-negativa", "Gate on archs"]
    assert (runner.folder / "negativa" / "bin" / "negativa").exists()


def hook(name: str, folder: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does, in a project that has the environment ``.venv``."""
    assert HOOKS[name]["language"] == "system"
    assert HOOKS[name]["pass_filenames"] is False
    return subprocess.run(
        [*shlex.split(HOOKS[name]["entry"]), *map(str, arguments)],
        cwd=folder,
        env={n: v for n, v in environ().items() if n not in ("VIRTUAL_ENV", "CONDA_PREFIX")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_hook_of_the_lock(site: Made, tmp_path: Path) -> None:
    site.folder.rename(tmp_path / ".venv")
    shutil.copy(site.lock_file, tmp_path / "negativa.lock")
    done = hook("negativa-lock", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / ".venv" / ONE).open("ab") as library:
        library.write(b"upgraded")
    done = hook("negativa-lock", tmp_path)
    assert done.returncode == 1
    assert "libone.so.1" in done.stdout + done.stderr


def test_files_that_start_the_hook_of_the_lock() -> None:
    files = re.compile(HOOKS["negativa-lock"]["files"])
    for name in ("negativa.lock", "sub/negativa.lock", "requirements-dev.txt", "uv.lock"):
        assert files.search(name), name
    assert not files.search("src/lock.py")


@pytest.mark.slow
def test_the_hook_of_slimmed_libraries(site: Made, tmp_path: Path) -> None:
    site.folder.rename(tmp_path / ".venv")
    assert hook("negativa-slim-check", tmp_path).returncode == 1  # Nothing was slimmed.
    command = ["negativa", "slim", "--no-way-back", "--lock", str(site.lock_file), ".venv"]
    subprocess.run(command, cwd=tmp_path, env=environ(), check=True, capture_output=True)
    assert hook("negativa-slim-check", tmp_path).returncode == 0
    with (tmp_path / ".venv" / ONE).open("r+b") as library:
        library.write(b"damaged")
    assert hook("negativa-slim-check", tmp_path).returncode == 1


@pytest.mark.slow
def test_the_repair_of_cibuildwheel(site: Made, tmp_path: Path) -> None:
    """The lines of the guide, joined and filled in as cibuildwheel does it, without auditwheel."""
    page = (DOCS / "guides" / "own-extension.md").read_text()
    [text] = re.findall(r"^repair-wheel-command = \[\n(.*?)^\]", page, re.MULTILINE | re.DOTALL)
    lines = re.findall(r'^  "(.+)",$', text, re.MULTILINE)
    command = " && ".join(lines).replace("/tmp/repaired", str(tmp_path / "repaired"))

    auditwheel = tmp_path / "bin" / "auditwheel"
    auditwheel.parent.mkdir()
    auditwheel.write_text('#!/bin/sh\nmkdir -p "$3" && cp "$4" "$3"\n')
    auditwheel.chmod(0o755)
    built = make_wheel(tmp_path, "gpu-code", "1.0", {ONE: site.one})
    given = environ()
    given["PATH"] = f"{auditwheel.parent}{os.pathsep}{given['PATH']}"
    for name in ("first", "second"):  # Two wheels of one job, each into a new folder.
        folder = tmp_path / name
        folder.mkdir()
        filled = command.format(wheel=built, dest_dir=folder, project=ROOT, package=ROOT)
        subprocess.run(["sh", "-c", filled], env=given, check=True)
        [made] = folder.iterdir()
        assert made.name == built.name
        assert made.stat().st_size < built.stat().st_size
