"""The benchmark of projects that nobody here wrote, with a small one and the stand-in for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.compiling import needs_compiler
from tests.support.libraries import ROOT
from tests.support.paged import needs_page_watch
from tests.support.verified import VerifiedProject

WILD = ROOT / "benchmarks" / "wild" / "wild.py"
SUITE = """
def test_use():
    use(LIB, 0)

def test_broken():
    assert not "as its project knows"
"""
FACTS = """
installed: its source
tests: [test_a.py]
known_failures: {test_broken: it asserts nothing}
"""


@needs_compiler
@needs_page_watch
@pytest.mark.slow
def test_a_project_is_run_once_and_shown(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "sources" / "tiny", SUITE)
    facts = tmp_path / "projects" / "tiny.yaml"
    facts.parent.mkdir()
    facts.write_text(FACTS)
    results, logs = tmp_path / "results", tmp_path / "logs"
    places = ("--results", results, "--projects", facts.parent)
    sources = ("--sources", tmp_path / "sources", "--logs", logs)

    def run() -> list[str]:
        shown = project.run(sys.executable, WILD, "run", *places, *sources).stdout
        return [line.split()[1] for line in shown.splitlines()]

    assert run() == ["warm", "plain", "proof"]
    # The list goes on where it ended.
    assert run() == []

    found = json.loads((results / "tiny.json").read_text())
    assert found["plain"]["outcomes"] == {
        "test_a::test_use": "passed", "test_a::test_broken": "failure",
    }  # fmt: skip
    proof = found["proof"]
    assert proof["proved"] and 0 < proof["kept_bytes"] < proof["bytes"]
    cpu = proof["cpu"]
    assert 0 < cpu["untouched_bytes"] < cpu["bytes"]

    (_, _, row, *rest) = project.run(sys.executable, WILD, "page", *places).stdout.splitlines()
    name, installed, tests, plain, _, code, pages, verdict, on_pages, *_ = row.strip("| ").split(
        " | "
    )
    assert (name, installed, tests) == ("tiny", "its source", "1 passed, 1 failure")
    assert plain == f"{found['plain']['seconds']} s"
    assert code.endswith(" MB") and pages.endswith(" MB")
    assert (verdict, on_pages) == ("proved", "proved" if cpu["proved"] else "not proved")
    assert rest[:4] == ["", "Failures:", "", "- tiny: test_a::test_broken: it asserts nothing"]
    assert len(rest) == 4 + len(cpu["reasons"])
