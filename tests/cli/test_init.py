"""The command ``negativa init``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from pytest_negativa.cli import main as cli
from pytest_negativa.settings.resolve import load_settings
from tests.support.libraries import BIN, MULTIARCH, PLAIN, ROOT

JOBS = Path(cli.__file__).parent / "jobs"


def init(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(cli.main, ["init"])


def test_a_project_with_libraries_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "pyproject.toml": 'dependencies = [\n  "flash-attn>=2",\n  "pytest"\n]\n',
        "tests/test_it.py": "import os\nfrom torch.nn import Module\n",
        "ours/deep.py": "    import cupy as cp\n",
        "venv/pyvenv.cfg": "",
        "venv/lib/a.py": "import jax\n",
        ".tox/b.py": "import numba\n",
    }.items():
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(MULTIARCH, tmp_path / "ours" / "_C.cpython-312-x86_64-linux-gnu.so")
    shutil.copy(BIN / "libdebug.so", tmp_path / "ours" / "libours.so.1")
    shutil.copy(BIN / "libdebug.so", tmp_path / "venv" / "libtheirs.so")
    shutil.copy(PLAIN, tmp_path / "libplain.so")
    (tmp_path / "broken.so").write_text("no library")
    done = init(tmp_path, monkeypatch)
    assert (done.exit_code, done.stdout.count("install -e .")) == (0, 1), done.output
    assert "wrote negativa.yaml; the job below is for a workflow" in done.stderr
    text = (tmp_path / "negativa.yaml").read_text()
    assert "uses cupy, flash_attn, torch." in text and "jax" not in text
    found = load_settings({}, {}, root=tmp_path)
    assert found.coverage.libraries == ("_C.*", "libours.*")
    # What it only proposes is sound, too.
    proposed = [line.removeprefix("# ").removeprefix("#") for line in text.splitlines()]
    settings = "\n".join(line for line in proposed if line[-1:] in ":]" or line[-1:].isdigit())
    (tmp_path / "negativa.yaml").write_text(settings)
    found = load_settings({}, {}, root=tmp_path)
    assert found.libraries.include == ("dist:cupy*", "dist:flash-attn*", "dist:torch*")
    assert found.keep.archs == ("sm_80", "sm_89")
    assert found.coverage.fail_under.overall == 80


def test_a_project_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".gitlab-ci.yml").touch()
    done = init(tmp_path, monkeypatch)
    assert done.exit_code == 0 and 'pip install "pytest-negativa[cu13]' in done.stdout
    assert yaml.safe_load(done.stdout)["gpu-code"]["tags"] == ["gpu"]
    assert load_settings({}, {}, root=tmp_path).coverage.libraries == ()


@pytest.mark.parametrize(
    ("name", "text"), [("negativa.yaml", "cpu: true"), ("pyproject.toml", "[tool.negativa]")]
)
def test_settings_that_are_there_stay(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / name).write_text(text)
    done = init(tmp_path, monkeypatch)
    assert done.exit_code == 2
    assert f"{path}: the project has settings already; edit this file" in done.stderr
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == (text, 1)


@pytest.mark.parametrize("name", ["github", "gitlab"])
def test_the_guide_shows_the_same_job(name: str) -> None:
    guide = (ROOT / "docs" / "guides" / "ci.md").read_text()
    assert f"```yaml\n{(JOBS / f'{name}.yaml').read_text()}```\n" in guide
