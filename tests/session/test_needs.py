"""What a part of the tests needs, out of one trace: ``tests``, ``needs`` and ``kernels --test``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.verified import VerifiedProject

SUITE = """
from standin_gpu import launch

@pytest.fixture(scope="module")
def model():
    use(LIB, 2)
    launch("statistics_weighted_sum")

@pytest.mark.fast
@pytest.mark.parametrize("n", [1, 2])
def test_add(n):
    use(LIB, 0)
    launch("vector_add", "vector_add")

@pytest.mark.slow
class TestMatrices:
    def test_multiply(self, model):
        use(LIB, 0, 1)
        launch("vector_add", "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii")
"""
INI = "[pytest]\nmarkers =\n  fast\n  slow\n"


def traced(folder: Path, *arguments: str, suite: str = SUITE) -> VerifiedProject:
    project = VerifiedProject(folder / "project", suite)
    project.write("pytest.ini", INI)
    return project.trace(*arguments)


@pytest.mark.slow
def test_a_part_of_the_tests_is_planned_and_proved_alone(tmp_path: Path) -> None:
    project = traced(tmp_path, "--negativa-level=launch")

    shown = project.negativa("needs", "-m", "fast", "--plan").stdout

    # Of the three elements that all tests need, the part needs that of vector_add, and that of the
    # fixture, which belongs to no test.
    assert shown.startswith("2 of 3 tests: 4.6 kB of 67.2 kB GPU code needed (6.8%), 7.0 kB by all")
    folder = re.search(r"Plan in (\S+)\. Prove it: (.*)", shown)
    assert folder is not None
    assert folder[2] == f"pytest --negativa-verify --negativa-run={folder[1]} -m fast"
    refused = project.negativa("lock", "--run", folder[1], status=1)
    assert "not proved" in refused.stderr
    project.negativa("lock", "--run", folder[1], "--unproved", "-o", "unproved.lock")
    assert "proved: false" in (project.folder / "unproved.lock").read_text()

    out = project.verify(f"--negativa-run={folder[1]}", "-m", "fast")
    assert "\nPROVED" in out
    project.negativa("lock", "--run", folder[1], "-o", "proved.lock")
    assert "proved: true" in (project.folder / "proved.lock").read_text()


@pytest.mark.slow
def test_who_used_what(tmp_path: Path) -> None:
    project = traced(tmp_path, "--negativa-level=launch", "-n2")

    rows = [line.split() for line in project.negativa("tests").stdout.splitlines()[2:]]
    assert ["test_a.py::TestMatrices::test_multiply", "2", "2"] in rows
    assert ["test_a.py::test_add[1]", "1", "2"] in rows
    of_kernel = project.negativa("tests", "--kernel", "*matrices::*").stdout.splitlines()[2:]
    assert [line.split()[0] for line in of_kernel] == ["test_a.py::TestMatrices::test_multiply"]
    kernels = project.negativa("kernels", "--test", "test_a.py::test_add[2]").stdout
    assert kernels.splitlines()[1:] == ["  vector_add  (2 launches)"]
    alike = project.negativa("tests", "--similar", "marker").stdout.splitlines()[2:]
    # pytest.mark.parametrize is a marker, too.
    assert [line.split() for line in alike] == [
        ["fast", "parametrize", "1", "1", "1.00"],
        ["fast", "slow", "1", "2", "0.50"],
        ["parametrize", "slow", "1", "2", "0.50"],
    ]
    for selection in (["-k", "Matrices"], ["test_a.py::TestMatrices"], ["-m", "not fast"]):
        assert project.negativa("needs", *selection).stdout.startswith("1 of 3 tests")


def test_without_launches_the_trace_tells_no_part(tmp_path: Path) -> None:
    project = traced(tmp_path, suite=re.sub(r"    launch\(.*", "", SUITE))

    done = project.negativa("needs", "-m", "fast", status=1)

    assert "counted no launches" in done.stderr and "--negativa-level=launch" in done.stderr
    shown = project.negativa("tests").stdout
    assert "A test is listed with the kernels that it looked up first" in shown
