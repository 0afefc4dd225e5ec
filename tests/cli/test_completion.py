"""``negativa completion``, and the words that it completes."""

from __future__ import annotations

import os
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
    assert script.read_text().startswith(complete("bash").stdout)
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


def fish_script(folder: Path) -> Path:
    script = folder / "fish/completions/negativa.fish"
    script.parent.mkdir(parents=True)
    return script


def install_for_fish(folder: Path | str) -> Result:
    return complete("fish", "--install", XDG_CONFIG_HOME=str(folder))


@pytest.mark.parametrize("mine", ["mine", "env _NEGATIVA_COMPLETE=fish_source negativa | source\n"])
def test_another_file_stays(tmp_path: Path, mine: str) -> None:
    target = fish_script(tmp_path)
    target.write_text(mine)
    done = install_for_fish(tmp_path)
    assert done.exit_code == 1 and "another file is there" in done.stderr
    assert target.read_text() == mine


def test_a_script_of_another_version_is_replaced(tmp_path: Path) -> None:
    target = fish_script(tmp_path)
    install_for_fish(tmp_path)
    ours = target.read_text()
    target.write_text(f"# as click wrote it before\n{ours}")
    assert install_for_fish(tmp_path).exit_code == 0
    assert target.read_text() == ours
    # Placed by hand.
    target.write_text(complete("fish").stdout)
    assert install_for_fish(tmp_path).exit_code == 0
    assert target.read_text() == ours


def test_a_link_stays(tmp_path: Path) -> None:
    target = fish_script(tmp_path)
    dotfile = tmp_path / "dotfile"
    target.symlink_to(dotfile)
    for _ in range(2):
        assert install_for_fish(tmp_path).exit_code == 0
        assert target.is_symlink() and "_NEGATIVA_COMPLETE" in dotfile.read_text()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    assert "Not a directory" in install_for_fish("/etc/passwd").stderr
    target = fish_script(tmp_path)
    target.mkdir()
    assert "Is a directory" in install_for_fish(tmp_path).stderr
    target.rmdir()
    os.mkfifo(target)
    assert "not a regular file" in install_for_fish(tmp_path).stderr
    target.unlink()
    target.parent.rmdir()
    target.parent.symlink_to("gone")
    assert "File exists" in install_for_fish(tmp_path).stderr


def test_a_relative_xdg_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert install_for_fish("here").exit_code == 0
    assert (tmp_path / ".config/fish/completions/negativa.fish").exists()


def test_an_unknown_shell() -> None:
    assert "name the shell: bash, fish, zsh" in complete(SHELL="/bin/tcsh").stderr
