"""Commands that list: JSON that fits its schema, and the kernels that are asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pytest_negativa.models.trace import LaunchRecord, Role
from pytest_negativa.storage.schema import schema_text
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.sessions import Project
from tests.support.traces import header, records, write


def listed(project: Project, schema: str, *command: str, status: int = 0) -> Any:
    """What the command prints with ``--json``."""
    found = json.loads(project.negativa(*command, "--json", status=status).stdout)
    jsonschema.validate(found, json.loads(schema_text(schema)))
    return found


@pytest.fixture
def located(project: Project) -> Project:
    """A project with a run, which replayed the recording."""
    project.write("test_a.py", "def test_passes():\n    pass\n")
    project.pytest("-q", "--negativa")
    return project


@pytest.mark.slow
def test_listings_of_runs(located: Project) -> None:
    [run] = listed(located, "runs", "runs")["rows"]
    assert run["is_latest"] and run["state"] == "planned (replay)"


@pytest.mark.slow
def test_a_replay_has_no_other_level_than_its_recording(project: Project) -> None:
    project.write("test_a.py", "def test_passes():\n    pass\n")
    project.pytest("-q", "--negativa", "--negativa-level=launch")
    how = "trace, or record for a replay, with --negativa-level=launch"
    assert how in project.negativa("needs", "-k", "passes", status=1).stderr
    assert how in " ".join(project.negativa("tests").stdout.split())
    ways = "; next: pytest --negativa on a machine with a GPU, or negativa lock --unproved\n"
    assert project.negativa("lock", status=1).stderr.endswith(ways)


@pytest.mark.slow
def test_kernels(located: Project) -> None:
    def names(*options: str) -> list[str]:
        [library] = listed(located, "kernels", "kernels", *options)["rows"]
        return [kernel["name"] for kernel in library["kernels"]]

    assert len(names()) == 9
    assert len(names("--used")) == 4
    assert names("--match", "image_*") == ["image_blur", "image_flip", "image_threshold"]
    # A glob may be of the demangled name.
    [multiply] = names("--match", "*multiply<32>*")
    assert multiply.startswith("_Z")
    assert names("--match", "image_blur", "--match", "image_flip") == ["image_blur", "image_flip"]
    [used] = listed(located, "kernels", "kernels", "--used")["rows"]
    assert used["kernels"][0]["first"].endswith(" (call)")

    shown = located.negativa("kernels", "--match", "image_*").stdout.splitlines()
    assert shown[0].endswith("libquickstart.so: 3 of 9 unused kernels match")
    assert shown[1:] == ["  image_blur", "  image_flip", "  image_threshold"]
    # A kernel is a line, for grep, however narrow the terminal is.
    assert located.negativa("kernels", COLUMNS="30").stdout == located.negativa("kernels").stdout
    [none] = located.negativa("kernels", "--match", "zz").stdout.splitlines()
    assert none.endswith("libquickstart.so: 0 of 9 unused kernels match")
    refused = located.negativa("kernels", "--test", "nope", status=2).stderr
    assert "'nope' ran no kernel; negativa tests lists the tests that did" in refused


@pytest.mark.slow
def test_slimmed_libraries(project: Project) -> None:
    library = project.folder / "site" / "libquickstart.so"
    library.parent.mkdir()
    library.write_bytes(QUICKSTART_LIBRARY.read_bytes())
    asked = ("slim", "--arch", "sm_90", "--dry-run", "site")
    [row] = listed(project, "slim", *asked)["rows"]
    assert row["status"] in ("would be slimmed", "left as it is")
    assert listed(project, "slim", "slim", "check", "site", status=1)["rows"] == []
    assert listed(project, "slim", "slim", "undo", "site")["rows"] == []


@pytest.mark.slow
def test_launches_of_children_are_not_counted(project: Project) -> None:
    folder = project.folder / "run" / "trace"
    launched = LaunchRecord(name="counted", count=2, context=2)
    write(folder, header(), [*records("counted"), launched])
    project.negativa("locate", "--run", "run")
    assert "test_a.py::test_a" in project.negativa("tests", "--run", "run").stdout

    write(folder, header(pid=8, role=Role.CHILD), records("of_a_child", nodeid="test_a.py::test_b"))
    project.negativa("locate", "--run", "run")
    shown = project.negativa("tests", "--run", "run").stdout
    assert shown.splitlines()[3].split() == ["test_a.py::test_b", "1", "-", "-"]
    assert "A process that counted no launches has its kernels listed with the" in shown
