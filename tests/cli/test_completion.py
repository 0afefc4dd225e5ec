"""Completion of commands by click, as the guide sets it up."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.libraries import DOCS, NEGATIVA


def test_bash_completes() -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    guide = (DOCS / "guides" / "programs.md").read_text("utf-8")
    [line] = [line for line in guide.splitlines() if line.startswith("eval ")]
    ask = (
        f"{line}\nCOMP_WORDS=(negativa reconst); COMP_CWORD=1; "
        "_negativa_completion negativa; echo ${COMPREPLY[@]}"
    )
    path = {"PATH": f"{NEGATIVA.parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=path)
    assert done.stdout == "reconstruct\n"
