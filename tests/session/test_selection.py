"""``tests`` of ``negativa.yaml``: which tests a traced session runs."""

from __future__ import annotations

import re

import pytest

from tests.support.sessions import Project

SUITE = """
import pytest


@pytest.mark.gpu
def test_fast():
    pass


@pytest.mark.gpu
@pytest.mark.slow
def test_slow():
    pass


@pytest.mark.parametrize("size", [1, 2])
def test_host(size):
    pass
"""
INI = "[pytest]\nmarkers =\n    gpu: needs one\n    slow: takes long\n"


def selected(project: Project, tests: str, *arguments: str) -> tuple[set[str], str]:
    """Names of the tests that a session ran, and what it printed."""
    project.write("pytest.ini", INI)
    project.write("test_a.py", SUITE)
    project.write("negativa.yaml", f"trace: {{replay: recorded}}\ntests: {{{tests}}}\n")
    done = project.pytest("-rA", "--negativa", "--strict-markers", *arguments)
    return set(re.findall(r"^PASSED test_a.py::test_(\S+)", done.stdout, re.M)), done.stdout


@pytest.mark.parametrize(
    ("tests", "arguments", "expected"),
    [
        ("markers: gpu and not slow", (), {"fast"}),
        ("markers: gpu", ("-m", "not slow"), {"fast"}),
        ("markers: gpu or slow", ("-m", "slow or not gpu"), {"slow"}),
        ("keywords: fast or host", (), {"fast", "host[1]", "host[2]"}),
        ("keywords: fast or host", ("-k", "host or slow"), {"host[1]", "host[2]"}),
        ('include: ["*::test_host[1]", "test_a.py::test_s*"]', (), {"host[1]", "slow"}),
        ('exclude: ["*[2]", "*_slow"]', ("-k", "not fast"), {"host[1]"}),
        ('markers: gpu, keywords: "fast or host", exclude: ["*slow*"]', (), {"fast"}),
    ],
)
def test_selection(
    project: Project, tests: str, arguments: tuple[str, ...], expected: set[str]
) -> None:
    found, text = selected(project, tests, *arguments)
    assert found == expected
    assert f"{4 - len(expected)} deselected" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "arguments", "expected"),
    [
        ("markers: gpu or slow", ("-m", "slow or not gpu"), {"slow"}),
        ('keywords: fast or host, exclude: ["*[2]"]', (), {"fast", "host[1]"}),
    ],
)
def test_selection_with_workers(
    project: Project, tests: str, arguments: tuple[str, ...], expected: set[str]
) -> None:
    assert selected(project, tests, "-n2", *arguments)[0] == expected


def test_the_selection_is_for_traced_sessions(project: Project) -> None:
    project.write("pytest.ini", INI)
    project.write("test_a.py", SUITE)
    project.write("negativa.yaml", "tests: {markers: gpu}\n")
    assert "4 passed" in project.pytest("-q").stdout
