"""What is noted of how a session was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.session.circumstances import circumstances_of

ADDS = """
from pathlib import Path

def pytest_addoption(parser):
    parser.addoption("--device", default=Path("cpu"), type=Path)
"""


def test_paths_values_and_pytests_configuration(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ADDS)
    pytester.makeini("[pytest]\n")
    config = pytester.parseconfigure("--device=cuda")
    known = circumstances_of(config, {"KEY": "secret", "OTHER": "b"}, ["test_a.py"])
    assert known.options["device"] == repr(Path("cuda"))
    assert set(known.files) == {"conftest.py", "tox.ini"}
    assert {name: len(digest) for name, digest in known.variables.items()} == {"KEY": 4, "OTHER": 4}
    pytester.makeini("[pytest]\nmarkers = a\n")
    assert circumstances_of(config, {"KEY": "x"}, []).files != known.files
