"""Which runs can be verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.traced_run import load_traced_run
from tests.support.analyses import settings


def test_a_usage_of_another_version_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.usage_file.write_text('{"format": 2}')
    with pytest.raises(StoreError, match="format 2, this release reads 1"):
        load_traced_run(run, settings(tmp_path))


def test_a_folder_without_usage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nor a trace; expected the folder of a run"):
        load_traced_run(Run(tmp_path), settings(tmp_path))
