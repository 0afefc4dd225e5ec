"""What a verification takes from a traced run."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import USAGE_VERSION
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.verification import load_traced_run
from tests.support.usages import usage_of


def test_a_usage_of_another_format_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_record(run.usage_file, replace(usage_of(), format_version=USAGE_VERSION + 1))
    with pytest.raises(StoreError, match=f"format_version {USAGE_VERSION + 1}, this release reads"):
        load_traced_run(run, Settings())
