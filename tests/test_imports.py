"""Nothing heavy is imported without need; the layers are import-linter's (pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "pytest_negativa",
            "msgspec elftools zstandard lz4 click cupti rich tabulate yaml packaging "
            "importlib.metadata",
        ),
        (
            "pytest_negativa.cli.main",
            "msgspec elftools zstandard lz4 cupti rich tabulate yaml packaging hashlib difflib "
            "pytest_negativa.settings.resolve pytest_negativa.reporting",
        ),
        (
            "pytest_negativa.analysis.inspect",
            "rich tabulate cupti multiprocessing importlib.metadata",
        ),
    ],
)
def test_import_brings_only_what_is_needed(module: str, unwanted: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {module}; "
        f"print(*(set({unwanted.split()!r}) & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
