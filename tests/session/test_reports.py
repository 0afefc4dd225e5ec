"""Reports as a user gets them: of a session, of an earlier run, with a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from pytest_negativa.storage.schema import schema_text
from tests.support.pages import read_page
from tests.support.sessions import Project
from tests.support.verified import VerifiedProject

TEST = "def test_passes():\n    pass\n"
SUITE = """
def test_use():
    use(LIB, 0, 1)
    assert FAULT != "fail"
"""
ALL = "terminal,terminal-missing,github,json,markdown,markdown:own.md,html,lcov,cobertura"


@pytest.mark.slow
def test_all_types(project: Project) -> None:
    project.write("test_a.py", TEST)
    done = project.pytest("--negativa", f"--negativa-report={ALL}", COLUMNS="80")
    headline = "60.2 kB of 67.2 kB GPU code (89.6%) in 1 library is unused"
    assert headline in done.stdout
    assert "libquickstart.so: 4 of 13 kernels looked up (30.8%)\n  without line info" in done.stdout
    assert "\n::notice title=GPU code::60.2 kB of 67.2 kB GPU code (89.6%25) in 1" in done.stdout
    shown = done.stdout.partition("= GPU code (pytest-negativa) =")[2].splitlines()
    # An annotation is one line.
    assert max(len(line) for line in shown if not line.startswith("::")) <= 80

    report = json.loads((project.results / "report.json").read_text())
    jsonschema.validate(report, json.loads(schema_text("report")))
    markdown = (project.results / "report.md").read_text()
    assert "| `libquickstart.so` | 67.2 kB | 60.2 kB | 89.6% |" in markdown
    assert (project.folder / "own.md").read_text() == markdown
    page = read_page(project.results / "report.html")
    tests, history = dict(page["tables"]["tests"]), dict(page["tables"]["history"])
    assert page["texts"][tests["name"][0]] == "test_a.py::test_passes"
    assert page["texts"][tests["outcome"][0]] == "passed"
    assert history["unused_bytes"] == (60216,)
    lcov = (project.results / "kernels.lcov").read_text()
    index = project.runs()[0] / "kernels.libquickstart.so.txt"
    assert f"SF:{index.relative_to(project.folder)}\n" in lcov and lcov.count("FNDA:1,") == 4
    assert len(index.read_text().splitlines()) == 13
    root = ET.parse(project.results / "kernels.xml").getroot()
    assert (root.get("lines-covered"), root.get("lines-valid")) == ("4", "13")

    again = project.negativa("report", "terminal", "lcov:-", "markdown:own.md")
    assert headline in again.stdout and "FNDA:1," in again.stdout
    assert (project.folder / "own.md").read_text() == markdown
    [run] = project.runs()
    annotated = project.negativa("report", "--run", run.name, "github").stdout
    assert annotated.startswith("::warning title=9 ")


@pytest.mark.slow
def test_what_is_no_report(project: Project) -> None:
    assert "no traced run" in project.negativa("report", "json", status=2).stderr
    project.write("test_a.py", TEST)
    project.pytest("--negativa")
    (project.results / "latest" / "report.json").unlink()
    gone = project.negativa("report", status=1).stderr
    assert "no report here; make it with negativa locate --run" in gone


@pytest.mark.slow
def test_reports_of_a_proof(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.pytest("-q", "--negativa", "--negativa-verify", "--negativa-report=markdown")
    proved = "Proved: the tests end as before without 63.1 kB of GPU code, on overwritten copies."
    assert proved in (project.results / "report.md").read_text()

    screen = "--negativa-report=terminal,github"
    failed = project.verify(screen, status=1, FAULT="fail")
    assert "\nNot proved: 1 test ended with another outcome" in failed
    assert "\n::error title=GPU code::Not proved: " in failed
    assert proved not in project.verify()
    assert proved in project.negativa("report").stdout
    assert '"proved": true' in project.negativa("report", "json:-").stdout
