"""The example of a plugin does what its README says."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.libraries import EXAMPLES
from tests.support.sessions import LOADED, NOT_LOADED, Project, import_path

PLUGIN = EXAMPLES / "plugin"


def readme_blocks(language: str) -> list[str]:
    text = (PLUGIN / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_public_kernels(quickstart: Project) -> None:
    [command] = readme_blocks("bash")
    variable, program, *arguments = shlex.split(command.replace("../plugin", str(PLUGIN)))
    assert (variable, program) == (f"PYTHONPATH={PLUGIN}", "pytest")

    done = quickstart.pytest(*arguments, PYTHONPATH=import_path(PLUGIN))

    [expected] = readme_blocks("text")
    assert f"\n{expected}Next: " in done.stdout
    assert "57.8 kB of 67.2 kB GPU code (86.1%)" in done.stdout
    kept = {tuple(d[:2]): d[3:] for d in quickstart.plan() if d[2]}
    assert set(kept) == {*LOADED, NOT_LOADED}
    assert kept[NOT_LOADED] == ["hook", "image_blur is public"]


@pytest.mark.slow
def test_public_kernels_with_workers_and_without_the_flag(quickstart: Project) -> None:
    arguments = ("-q", "-p", "public_kernels", f"--public-kernels={PLUGIN / 'public_kernels.txt'}")
    assert (
        "4 of 10 are tested"
        in quickstart.pytest("--negativa", "-n2", *arguments, PYTHONPATH=import_path(PLUGIN)).stdout
    )
    assert (
        "Public kernels" not in quickstart.pytest(*arguments, PYTHONPATH=import_path(PLUGIN)).stdout
    )


def test_a_list_that_is_not_there(quickstart: Project) -> None:
    done = quickstart.pytest(
        "--negativa", "-p", "public_kernels", "--public-kernels=none.txt",
        PYTHONPATH=import_path(PLUGIN), status=4,
    )  # fmt: skip
    assert "--public-kernels: none.txt: No such file or directory" in done.stderr
