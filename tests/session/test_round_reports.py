"""Report files of other plugins in sessions of several rounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.standin.standin_gpu import USED
from tests.support.verified import VerifiedProject

# The last region's element for sm_90, which no trace shows as used.
HIDDEN = USED[3]

SUITE = f"""
def test_use():
    use(LIB)

def test_need():
    if ROUND == "verify":
        need(LIB, {HIDDEN})

def test_other():
    pass
"""

# What pytest-html and pytest-cov do with their options, as far as it matters here.
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--html", dest="htmlpath")
    parser.addoption("--cov", dest="cov_source")
    parser.addoption("--cov-append", dest="cov_append", action="store_true")


def pytest_configure(config):
    config.html = config.getoption("htmlpath")


def pytest_sessionfinish(session):
    if session.config.html and not hasattr(session.config, "workerinput"):
        with open(session.config.html, "w") as file:
            file.write(f"{session.testscollected} tests, {session.testsfailed} failed")
"""


@pytest.fixture
def project(tmp_path: Path) -> VerifiedProject:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write("other_reports.py", CONFTEST)
    project.environ["PYTHONPATH"] = f"{project.folder}:{project.environ['PYTHONPATH']}"
    project.environ["PYTEST_ADDOPTS"] += " -p other_reports"
    return project


def counts(path: Path) -> tuple[int, int]:
    """Tests and failures of a JUnit file."""
    text = path.read_text()
    tests, failures = (re.search(rf' {word}="(\d+)"', text) for word in ("tests", "failures"))
    assert tests and failures
    return int(tests[1]), int(failures[1])


@pytest.mark.parametrize(
    "workers",
    [pytest.param((), id="plain"), pytest.param(("-n2",), id="workers")],
)
@pytest.mark.nightly
def test_the_traced_run_keeps_its_reports(
    project: VerifiedProject, workers: tuple[str, ...]
) -> None:
    """The runs on copies don't write over them."""
    options = ("--junit-xml=junit.xml", "--html=out.html", "--log-file=log.txt")
    project.pytest("-q", "--negativa", "--negativa-heal", *options, *workers)

    assert counts(project.folder / "junit.xml") == (3, 0)
    assert (project.folder / "out.html").read_text() == "3 tests, 0 failed"
    assert len(project.verdict["rounds"]) == 2
    [verification] = (project.run_folder / "verify").iterdir()
    rounds = [folder for folder in verification.iterdir() if (folder / "round.json").exists()]
    assert len(rounds) == len(project.verdict["rounds"])
    for folder in rounds:
        assert {p.name for p in (folder / "reports").iterdir()} == {
            "junit.xml", "report.html", "log.txt",
        }  # fmt: skip
    assert counts(verification / "001-verify" / "reports" / "junit.xml") == (3, 1)
    assert not list(project.results.glob("junit*"))


@pytest.mark.nightly
def test_without_a_traced_run_they_are_of_the_last_run_of_all_tests(
    project: VerifiedProject,
) -> None:
    project.trace()
    xml = project.folder / "junit.xml"
    project.verify("--junit-xml=junit.xml", status=1)
    assert counts(xml) == (3, 1)
    project.heal("--junit-xml=junit.xml", "--html=out.html")
    assert counts(xml) == (3, 0)
    assert (project.folder / "out.html").read_text() == "3 tests, 0 failed"


@pytest.mark.slow
def test_coverage_is_added_up(project: VerifiedProject) -> None:
    """Known before plugins are configured: coverage starts early."""
    project.write(
        "early.py",
        """
import pytest

@pytest.hookimpl
def pytest_load_initial_conftests(early_config):
    with open("appends.txt", "a") as file:
        file.write(f"{early_config.known_args_namespace.cov_append} ")
""",
    )
    project.environ["PYTEST_ADDOPTS"] += " -p early"
    project.pytest(
        "-q", "--negativa", "--negativa-verify", "--negativa-rerun=0", "--cov=.", status=1
    )
    # The session's own process, the traced run, and that on the copies.
    assert (project.folder / "appends.txt").read_text() == "False True "


@pytest.mark.nightly
def test_files_that_are_open_already_stay(project: VerifiedProject) -> None:
    """As of pytest-benchmark before 5.2: it takes no name in their place."""
    project.write(
        "opened.py",
        """
import argparse


def pytest_addoption(parser):
    parser.addoption("--benchmark-json", type=argparse.FileType("wb"))


def pytest_sessionfinish(session):
    with session.config.getoption("benchmark_json") as file:
        file.write(b"{}")
""",
    )
    project.environ["PYTEST_ADDOPTS"] += " -p opened"
    project.trace("--benchmark-json=out.json")
    project.heal("--benchmark-json=out.json")
    assert (project.folder / "out.json").read_text() == "{}"


def test_sessions_of_one_round_write_where_they_are_told(project: VerifiedProject) -> None:
    project.pytest("-q", "--negativa", "--junit-xml=junit.xml", "--html=out.html")
    assert counts(project.folder / "junit.xml") == (3, 0)
    assert (project.folder / "out.html").exists()
    assert not list(project.run_folder.rglob("reports"))
