"""A workspace to which others can write: pipes, links and endless files in the place of records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sessions import Project

SECRET = "wJalrXUtnFEMI"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    """To what the user may read, and others may not."""
    secret = path.parents[3] / "secret"
    secret.write_text(f'{{"format_version": "{SECRET}"}}\n{SECRET}\n')
    path.symlink_to(secret)


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


COMMANDS = {
    "usage.json": "tests",
    "report.json": "report markdown:-",
    "verdict.json": "lock --unproved",
    "tests.jsonl": "tests --similar test",
    "healed.json": "locate",
    "opened.json": "locate",
    "files.json": "lock --unproved",
    "failed": "runs list",
    "partial": "lock --unproved",
    "map/libquickstart.so.json": "reconstruct",
    "plan/libquickstart.so.json": "lock --unproved",
    "cpu.json": "pages",
}
"""A command that reads each record."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (pipe, "cannot be read: not a regular file"),
        (link, "cannot be read: a link, which is not followed"),
        (endless, "cannot be read: larger than 2,147,483,648 bytes"),
    ],
    ids=["pipe", "link", "endless"],
)
def test_what_is_no_record_is_not_read(
    project: Project, plant: Callable[[Path], None], says: str
) -> None:
    """Each command ends, names the file, and shows nothing of what a link leads to."""
    project.write("test_a.py", "def test_a():\n    pass\n")
    project.pytest("-q", "--negativa")
    [run] = project.runs()
    for name, command in COMMANDS.items():
        record = run / name
        before = record.read_bytes() if record.exists() else None
        record.unlink(missing_ok=True)
        plant(record)
        status = 0 if name == "failed" else 1
        done = project.negativa(*command.split(), status=status)
        shown = done.stdout + done.stderr
        assert f"{record.name}: {says}" in shown or f"{name} {says}" in shown
        assert SECRET not in shown
        record.unlink()
        if before is not None:
            record.write_bytes(before)


@pytest.mark.slow
def test_combine_copies_no_trace_that_is_a_link(project: Project) -> None:
    """A run that comes from elsewhere must not bring files of this machine into another run."""
    project.write("test_a.py", "def test_a():\n    pass\n")
    project.pytest("-q", "--negativa")
    [run] = project.runs()
    link(run / "trace" / "other.jsonl")
    done = project.negativa("combine", run, status=1)
    assert "a link, which is not followed" in done.stderr
    files = (path for path in project.results.rglob("*") if path.is_file())
    assert not [
        path
        for path in files
        if SECRET in path.read_text(errors="replace") and not path.is_symlink()
    ]
