"""What a part of the tests needs, out of one trace: ``tests``, ``needs`` and ``kernels --test``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from pytest_negativa.storage.schema import schema_text
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
        names = "vector_add", "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"
        launch(*names, within=("forward", "matmul"))
"""
INI = "[pytest]\nmarkers =\n  fast\n  slow\n"


def traced(folder: Path, *arguments: str, suite: str = SUITE) -> VerifiedProject:
    project = VerifiedProject(folder / "project", suite)
    project.write("pytest.ini", INI)
    return project.trace(*arguments)


@pytest.mark.slow
def test_what_a_part_of_the_tests_needs(tmp_path: Path) -> None:
    project = traced(tmp_path, "--negativa-level=launch")
    done = project.negativa("needs", "-m", "fast")
    # Of the three elements that all tests need, the part needs that of vector_add, and that of the
    # fixture, which belongs to no test.
    assert done.stdout.startswith(
        "2 of 3 tests: 4.6 kB of 67.2 kB GPU code needed (6.8%), 7.0 kB by all"
    )
    assert done.stderr == "Next: pytest --negativa -m fast\n"


# As a version of pytest would that names it otherwise.
OTHER_PYTEST = """
from _pytest.mark import KeywordMatcher

del KeywordMatcher.from_item
"""


@pytest.mark.slow
def test_keywords_that_pytest_does_not_give(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write("pytest.ini", INI)
    project.write("conftest.py", OTHER_PYTEST)
    project.trace("--negativa-level=launch")
    lost = project.negativa("needs", "-k", "add", status=2).stderr
    assert "-k: the run has no keywords of its tests" in lost


@pytest.mark.slow
def test_who_used_what(tmp_path: Path) -> None:
    project = traced(tmp_path, "--negativa-level=launch", "-n2")

    rows = [line.split() for line in project.negativa("tests").stdout.splitlines()[2:]]
    assert ["test_a.py::TestMatrices::test_multiply", "2", "2", "2.0", "us"] in rows
    assert ["test_a.py::test_add[1]", "1", "2", "2.0", "us"] in rows
    of_tests = json.loads(project.negativa("tests", "--json").stdout)["rows"]
    [[within]] = (one["by_range"] for one in of_tests if one["test"].endswith("multiply"))
    assert within["ranges"] == ["forward", "matmul"]
    assert [(Path(one["libraries"][0]).name, one["signature"]) for one in within["kernels"]] == [
        ("lib.so", "vector_add"),
        (
            "lib.so",
            "void matrices::multiply<16>(float const*, float const*, float*, int, int, int)",
        ),
    ]
    listed = json.loads(project.negativa("tests", "--json", "--kernel", "vector_add").stdout)
    jsonschema.validate(listed, json.loads(schema_text("tests")))
    assert [(one["test"], one["gpu_ns"]) for one in listed["rows"]] == [
        ("test_a.py::TestMatrices::test_multiply", 1000),
        ("test_a.py::test_add[1]", 2000),
        ("test_a.py::test_add[2]", 2000),
    ]
    of_kernel = project.negativa("tests", "--kernel", "*matrices::*").stdout.splitlines()[2:]
    assert [line.split()[0] for line in of_kernel] == ["test_a.py::TestMatrices::test_multiply"]
    kernels = project.negativa("kernels", "--test", "test_a.py::test_add[2]").stdout
    assert kernels.splitlines()[1:] == ["  vector_add  (2 launches, 2.0 us)"]
    alike = project.negativa("tests", "--similar", "marker").stdout.splitlines()[2:]
    # pytest.mark.parametrize is a marker, too, but says nothing of what is tested.
    assert [line.split() for line in alike] == [["fast", "slow", "1", "2", "0.50"]]
    as_json = json.loads(project.negativa("tests", "--similar=marker", "--json", "--top=1").stdout)
    jsonschema.validate(as_json, json.loads(schema_text("similarity")))
    assert [(one["right"], one["similarity"]) for one in as_json["rows"]] == [("slow", 0.5)]
    one = project.negativa("tests", "--similar=marker", "--kernel=*matrices*", status=2)
    assert "fewer than two of these markers ran any kernels" in one.stderr
    needed = json.loads(project.negativa("needs", "-m", "fast", "--json").stdout)
    jsonschema.validate(needed, json.loads(schema_text("needs")))
    [library] = needed["libraries"]
    assert (needed["chosen"], needed["tests"]) == (2, 3)
    row = project.negativa("needs", "-m", "fast").stdout.split()
    assert row[-1] == str(library["used_kernels"])
    assert 0 < library["these_tests"] <= library["all_tests"] == needed["all_tests"]
    for selection in (["-k", "Matrices"], ["test_a.py::TestMatrices"], ["-m", "not fast"]):
        assert project.negativa("needs", *selection).stdout.startswith("1 of 3 tests")


@pytest.mark.slow
def test_without_launches_the_trace_tells_no_part(tmp_path: Path) -> None:
    project = traced(tmp_path, suite=re.sub(r"    launch\(.*", "", SUITE))

    done = project.negativa("needs", "-m", "fast", status=1)

    assert "counted no launches" in done.stderr and "--negativa-level=launch" in done.stderr
    shown = project.negativa("tests").stdout
    assert "has its kernels listed with the test that looked" in " ".join(shown.split())


CHILD = """
import sys
from standin_gpu import launch, trace_program, use

detector = trace_program()
use(sys.argv[1], 1)
launch(*["_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"] * 3)
detector.stop()
"""
PARENTS = """
from standin_gpu import launch

def test_add():
    use(LIB, 0)
    launch("vector_add")

def test_child():
    subprocess.run([sys.executable, "child.py", LIB], check=True)
"""


@pytest.mark.slow
def test_what_a_test_needs_in_its_child_process(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", PARENTS)
    project.write("child.py", CHILD)
    project.trace("--negativa-level=launch")

    def needed(test: str) -> tuple[int, int]:
        found = json.loads(project.negativa("needs", "-k", test, "--json").stdout)
        [library] = found["libraries"]
        return library["these_tests"], library["all_tests"]

    (of_child, all_tests), (of_other, _) = needed("child"), needed("add")
    assert (of_child, of_other, all_tests) == (2400, 1720, of_child + of_other)
    [_, row] = json.loads(project.negativa("tests", "--json").stdout)["rows"]
    counts = ("test_a.py::test_child", 1, 3, 3000)
    assert (row["test"], row["kernels"], row["launches"], row["gpu_ns"]) == counts
    kernels = project.negativa("kernels", "--test", "test_a.py::test_child").stdout
    assert "matrices::multiply<16>" in kernels and "vector_add" not in kernels
