"""When the plugin works, and when it must not be noticed at all."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import pytest_negativa
from pytest_negativa.models.environment import OWN_VARIABLES
from tests.support.faults import PlantedFault
from tests.support.sessions import Project, import_path

MODULES = {
    "msgspec",
    "elftools",
    "zstandard",
    "lz4",
    "yaml",
    "cupti",
    "pytest_negativa.session.traced_process",
}

SPY = """
import sys
from pathlib import Path


def pytest_unconfigure():
    Path("modules.txt").write_text("\\n".join(sys.modules))
"""

MARKED = """
import pytest


@pytest.mark.negativa_off(reason="profiles itself")
def test_marked():
    pass


def test_fixture(negativa_off):
    pass
"""


def test_without_the_flag_nothing_is_imported_said_or_written(project: Project) -> None:
    project.write("spy.py", SPY)
    project.write("test_a.py", MARKED)
    # Not even looked at.
    project.write("negativa.yaml", "no: such: yaml\n")

    done = project.pytest(
        "-q", "-p", "spy", "--strict-markers", PYTHONPATH=import_path(project.folder)
    )

    assert "2 passed" in done.stdout
    assert "negativa" not in done.stdout + done.stderr and "GPU" not in done.stdout
    assert not project.results.exists()
    loaded = set((project.folder / "modules.txt").read_text().split())
    assert "pytest_negativa.plugin" in loaded
    assert loaded & MODULES == set()


def test_the_spy_sees_what_a_traced_session_imports(project: Project) -> None:
    project.write("spy.py", SPY)
    project.write("test_a.py", MARKED)
    project.pytest("-q", "--negativa", "-p", "spy", PYTHONPATH=import_path(project.folder))
    loaded = set((project.folder / "modules.txt").read_text().split())
    # Replaying needs no CUPTI.
    assert loaded & MODULES == MODULES - {"cupti"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag",
    ["--collect-only", "--help", "--version", "--markers", "--fixtures", "--setup-plan",
     "--setup-only"],
)  # fmt: skip
def test_what_runs_no_test_is_not_traced(project: Project, flag: str) -> None:
    project.write("test_a.py", "def test_a():\n    pass\n")
    done = project.pytest("--negativa", flag)
    assert "replaying" not in done.stdout and "unused on" not in done.stdout
    assert not project.results.exists()


def test_faults_of_the_file_stop_the_session(project: Project) -> None:
    project.write("test_a.py", "def test_a():\n    pass\n")
    path = project.write("negativa.yaml", "keep:\n  kernel: [a]\n  ptx: latest\n")

    done = project.pytest("--negativa", status=4)

    assert f"{path}:2:3: unknown key 'kernel' in keep; did you mean kernels?" in done.stderr
    assert f"{path}:3:8: keep.ptx: found 'latest', expected off, newest or all" in done.stderr
    assert "passed" not in done.stdout
    assert "Traceback" not in done.stderr
    assert not project.results.exists()


def test_faults_of_a_flag_stop_the_session(project: Project) -> None:
    done = project.pytest("--negativa", "--negativa-keep-arch=ninety", status=4)
    assert "--negativa-keep-arch" in done.stderr and "ninety" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("--negativa-granularity=kernel",), "--negativa, --negativa-verify or --negativa-heal"),
        (("--negativa-copies", "compacted"), "--negativa-verify or --negativa-heal"),
        (
            ("--negativa-dir=out",),
            "--negativa, --negativa-verify or --negativa-heal",
        ),
        (("--no-negativa-children",), "--negativa, --negativa-verify or --negativa-heal"),
        (("--negativa", "--negativa-rerun=2"), "--negativa-verify or --negativa-heal"),
        (("--negativa-verify", "--negativa-keep-ptx=all"), "--negativa"),
    ],
)
def test_a_flag_without_effect_stops_the_session(
    project: Project, words: tuple[str, ...], needed: str
) -> None:
    project.write("test_a.py", "def test_a():\n    pass\n")
    done = project.pytest("-q", *words, status=4)
    flag = next(word for word in reversed(words) if word.startswith("--")).partition("=")[0]
    assert f"negativa: {flag} has no effect without {needed}\n" in done.stderr
    assert "passed" not in done.stdout and not project.results.exists()


@pytest.mark.slow
def test_a_run_to_verify_and_one_to_trace(project: Project) -> None:
    words = ("--negativa", "--negativa-verify", "--negativa-run=.")
    assert "--negativa-run has no effect with --negativa" in project.pytest(*words, status=4).stderr
    done = project.pytest("--negativa-verify", "--negativa-run=nowhere", status=4)
    assert "nowhere: no such run" in done.stderr


@pytest.mark.slow
def test_settings_for_other_sessions_are_no_mistake(project: Project) -> None:
    """In files and addopts; and where the switch is turned off for once."""
    project.write("test_a.py", "def test_a():\n    pass\n")
    addopts = f"{project.environ['PYTEST_ADDOPTS']} --negativa-granularity=kernel"
    project.pytest("-q", PYTEST_ADDOPTS=addopts)
    project.pytest("-q", "--negativa", "--negativa-top=3", "--no-negativa")
    project.pytest("-q", "--co", "--negativa-top=3")
    assert not project.results.exists()
    project.pytest("-q", "--negativa-top=3", PYTEST_ADDOPTS="--negativa")
    project.pytest("-q", "-n1", "--negativa-top=3", "--negativa", "--", "test_a.py")
    assert len(project.runs()) == 2


@pytest.mark.slow
@pytest.mark.planted_fault(
    "a variable of ours is misspelt",
    says="NEGATIVA_REQUIRE_GPUS: no option has this variable; did you mean NEGATIVA_REQUIRE_GPU?",
)
def test_a_misspelt_variable(project: Project, fault: PlantedFault) -> None:
    project.write("test_a.py", "def test_a():\n    pass\n")
    done = project.pytest("-q", "-n1", "--negativa", NEGATIVA_REQUIRE_GPUS="1")
    fault.check(done.stderr)
    assert done.stderr.count("no option has this variable") == 1
    assert "no option has" in project.negativa("locate", NEGATIVA_REQUIRE_GPUS="1").stderr
    assert "no option has" in project.pytest("-q", NEGATIVA_REQUIRE_GPUS="1").stderr


def test_a_table_in_pyproject_is_read_by_a_traced_session_alone(project: Project) -> None:
    (project.folder / "negativa.yaml").unlink()
    project.write("pyproject.toml", '[project]\n[tool.negativa]\nkeep = "all"\n')
    project.write("test_a.py", "def test_a():\n    pass\n")
    says = "pyproject.toml: [tool.negativa]: keep: found 'all', expected a mapping"
    assert says in project.pytest("-q", "--negativa", status=4).stderr
    assert says in project.negativa("locate", status=2).stderr
    assert "tool.negativa" not in project.pytest("-q").stderr


def test_every_variable_of_the_package_is_known() -> None:
    package = Path(pytest_negativa.__file__).parent
    texts = [p.read_text() for p in package.rglob("*") if p.suffix in (".py", ".c")]
    used = {name for text in texts for name in re.findall(r'"(NEGATIVA_[A-Z_]+)"', text)}
    # That one is of commands that install the package.
    assert used | {"NEGATIVA_GIT"} == OWN_VARIABLES


@pytest.mark.slow
def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    project = Project(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), tmp_path / "cache")
    project.folder.mkdir()
    project.write("test_a.py", "def test_a():\n    pass\n")
    for flag in ("--negativa", "--negativa-verify"):
        shown = project.pytest("-q", flag, status=4).stderr
        assert "\\udcff: this folder's name is not UTF-8, and the files of a run" in shown
    shown = project.negativa("trace", "--", "true", status=1).stderr
    assert "\\udcff/.negativa: this folder's name is not UTF-8" in shown
    # Commands that have nothing to do with runs work.
    assert "no NVIDIA GPU code" in project.negativa("inspect", "/bin/true").stdout
