"""Projects to run sessions in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sessions import Project, copy_library, copy_quickstart


@pytest.fixture
def quickstart(tmp_path: Path) -> Project:
    """A copy of tests/fixtures/quickstart."""
    return Project(copy_quickstart(tmp_path / "quickstart"), tmp_path / "cache")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The library and the recording of quickstart, without tests."""
    return Project(copy_library(tmp_path / "project"), tmp_path / "cache")
