"""Which runs can be verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.trace import USAGE_VERSION
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.traced_run import load_traced_run
from tests.support.analyses import settings, used
from tests.support.libraries import MULTIARCH


def test_a_usage_of_another_version_is_refused(tmp_path: Path) -> None:
    usage = replace(used(MULTIARCH), format_version=USAGE_VERSION + 1)
    run = Run(tmp_path)
    write_record(run.usage_file, usage)
    with pytest.raises(StoreError, match=f"format_version {USAGE_VERSION + 1}, this release reads"):
        load_traced_run(run, settings(tmp_path))


def test_a_folder_without_usage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nor a trace; expected the folder of a run"):
        load_traced_run(Run(tmp_path), settings(tmp_path))
