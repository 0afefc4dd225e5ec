"""The examples do what their READMEs say."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

import pytest

from tests.support.libraries import DOCS, EXAMPLES
from tests.support.sessions import Project, copy_project, import_path

PLUGIN = EXAMPLES / "plugin"
QUICKSTART = EXAMPLES / "quickstart"


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


@pytest.fixture
def quickstart(tmp_path: Path) -> Project:
    """A copy of examples/quickstart."""
    return Project(copy_project(QUICKSTART, tmp_path / "quickstart"), tmp_path / "cache")


def test_quickstart_shows_coverage_by_source_line(quickstart: Project) -> None:
    done = quickstart.pytest("--negativa")

    assert "replaying recorded, level range, " in done.stdout
    assert "= 3 passed, 39 recorded in " in done.stdout
    [coverage] = blocks_of(DOCS / "guides" / "own-extension.md", "text")
    assert coverage in done.stdout
    assert "936.9 kB of 1.1 MB GPU code (87.3%)" in done.stdout


def test_quickstart_is_slimmed_by_its_lock(quickstart: Project) -> None:
    """The lock was proved, and fits the library that is there."""
    library = quickstart.folder / "quickstart" / "libquickstart.so"
    original = library.read_bytes()
    slimmed = quickstart.negativa("slim", "--keep-originals", "originals", "quickstart").stdout
    assert "1.1 MB  171.9 kB" in slimmed
    assert "sound" in quickstart.negativa("slim", "check", "quickstart").stdout
    quickstart.negativa("slim", "undo", "quickstart")
    assert library.read_bytes() == original


def test_quickstart_is_as_built(quickstart: Project) -> None:
    for line in (QUICKSTART / "MANIFEST").read_text().splitlines():
        if not line.startswith("#"):
            digest, name = line.split()
            assert hashlib.sha256((QUICKSTART / name).read_bytes()).hexdigest() == digest
    # Its own commands write more beside these.
    parts = (quickstart.folder / name for name in ("quickstart", "recorded", "src", "tests"))
    total = sum(path.stat().st_size for part in parts for path in part.rglob("*"))
    assert 1_000_000 < total < 2_000_000


def test_public_kernels(quickstart: Project) -> None:
    [command] = blocks_of(PLUGIN / "README.md", "bash")
    variable, program, *arguments = shlex.split(command.replace("../plugin", str(PLUGIN)))
    assert (variable, program) == (f"PYTHONPATH={PLUGIN}", "pytest")

    done = quickstart.pytest(*arguments, PYTHONPATH=import_path(PLUGIN))

    [expected] = blocks_of(PLUGIN / "README.md", "text")
    assert f"\n{expected}Next: " in done.stdout
    assert "859.6 kB of 1.1 MB GPU code (80.1%)" in done.stdout
    kept = [decision[3:] for decision in quickstart.plan() if decision[2]]
    assert [why for why in kept if why[0] != "loaded"] == [
        ["hook", "fourier::transform<float, 16> is public"]
    ]


@pytest.mark.slow
def test_public_kernels_with_workers_and_without_the_flag(quickstart: Project) -> None:
    arguments = ("-q", "-p", "public_kernels", f"--public-kernels={PLUGIN / 'public_kernels.txt'}")
    assert (
        "4 of 12 are tested"
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
