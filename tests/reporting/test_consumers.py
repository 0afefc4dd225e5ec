"""Kernel coverage read by tools of others: lcov's genhtml, and diff-cover."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.reporting.coverage_files import group_by_file, render_cobertura, render_lcov
from tests.support.reports import OURS

# A virtual environment that is not active has its programs beside Python.
BESIDE_PYTHON = str(Path(sys.executable).parent)
DIFF_COVER = shutil.which("diff-cover") or shutil.which("diff-cover", path=BESIDE_PYTHON)
SOURCES = {"src/a.cu": 20, "src/b.cu": 5}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the sources of the kernels; the current folder."""
    for name, lines in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(f"// line {n + 1}\n" for n in range(lines)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("genhtml") is None, reason="needs genhtml (Debian: lcov)")
def test_genhtml(sources: Path) -> None:
    report = sources / "k.lcov"
    files = group_by_file([OURS], sources)
    for file in files:
        if file.index_file is not None:
            file.index_file.write_text(file.index_text)
    report.write_text(render_lcov(files))
    shown = run("genhtml", str(report), "-o", "html", "--prefix", str(sources))
    assert "lines......: 50.0% (2 of 4 lines)" in shown
    assert "functions..: 40.0% (2 of 5 functions)" in shown
    pages = "".join(page.read_text() for page in (sources / "html").rglob("*.html"))
    assert "void multiply&lt;32&gt;()" in pages
    assert "hidden" in pages


@pytest.mark.slow
@pytest.mark.skipif(DIFF_COVER is None, reason="needs diff-cover (PyPI)")
def test_diff_cover(sources: Path) -> None:
    """A change adds a kernel that no test uses."""
    report = sources / "k.xml"
    report.write_bytes(render_cobertura(group_by_file([OURS], sources), 0))
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.invalid")
    run(*git, "init", "-q", "-b", "main")
    run(*git, "add", "src/a.cu")
    run(*git, "commit", "-qm", "before")
    run(*git, "add", "src/b.cu")
    assert DIFF_COVER is not None
    run(DIFF_COVER, str(report), "--compare-branch=HEAD", "--format", "json:found.json")
    found = json.loads((sources / "found.json").read_text())
    assert found["src_stats"]["src/b.cu"]["violation_lines"] == [3]
    assert (found["total_num_lines"], found["total_num_violations"]) == (1, 1)
