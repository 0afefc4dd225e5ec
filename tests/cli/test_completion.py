"""``negativa completion``, and the words that it completes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main
from tests.support.libraries import NEGATIVA


def complete(*words: str, **environ: str) -> Result:
    return CliRunner().invoke(main, ["completion", *words], env=environ)


def test_bash_completes(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    data = {"XDG_DATA_HOME": str(tmp_path), "SHELL": "/bin/bash"}
    first = complete("--install", **data)
    script = tmp_path / "bash-completion/completions/negativa"
    assert first.stdout == f"Written to {script}. A new bash completes negativa.\n"
    assert script.read_text() == complete("bash").stdout
    assert complete("--install", "bash", **data).exit_code == 0
    ask = (
        f"source {script}; COMP_WORDS=(negativa image-); COMP_CWORD=1; "
        "_negativa_completion negativa; echo ${COMPREPLY[@]}"
    )
    path = {"PATH": f"{NEGATIVA.parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=path)
    assert done.stdout == "image-report\n"


@pytest.mark.parametrize(
    ("shell", "variable", "name"),
    [
        ("fish", "XDG_CONFIG_HOME", "fish/completions/negativa.fish"),
        ("zsh", "XDG_DATA_HOME", "zsh/site-functions/_negativa"),
    ],
)
def test_other_shells(tmp_path: Path, shell: str, variable: str, name: str) -> None:
    done = complete(shell, "--install", **{variable: str(tmp_path)})
    assert "_NEGATIVA_COMPLETE" in (tmp_path / name).read_text()
    assert ("fpath+=(" in done.stdout) == (shell == "zsh")


def test_another_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "fish/completions/negativa.fish"
    target.parent.mkdir(parents=True)
    target.write_text("mine")
    done = complete("fish", "--install", XDG_CONFIG_HOME=str(tmp_path))
    assert done.exit_code == 1 and "another file is there" in done.stderr
    assert target.read_text() == "mine"


def test_an_unknown_shell() -> None:
    assert "name the shell: bash, fish, zsh" in complete(SHELL="/bin/tcsh").stderr
