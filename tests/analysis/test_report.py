"""Limits that a report finds crossed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import build_report
from pytest_negativa.models.report import RunReport
from tests.support.analyses import settings, used
from tests.support.libraries import MULTIARCH


def report(folder: Path, text: str) -> RunReport:
    options = settings(folder, text)
    analysis = analyze(used(MULTIARCH, regions=(1,)), options)
    return build_report(analysis, options, run_id="run", directory="run", files=())


@pytest.mark.parametrize(
    ("section", "limit"),
    [
        ("coverage: {fail_under_library", "0"),
        ("thresholds: {max_unused_percent_library", "100"),
        ("thresholds: {max_gpu_code_library", "1 GB"),
        ("compare: {baseline: b.json, fail_library", "['size:0%']"),
    ],
)
def test_a_limit_of_no_library_is_crossed(tmp_path: Path, section: str, limit: str) -> None:
    def unmatched(glob: str, more: str = "") -> list[str]:
        found = report(tmp_path, f"{section}: {{'{glob}': {limit}}}}}{more}")
        return [line for line in found.crossed if "matches nothing" in line]

    [line] = unmatched("libmultiarc.so")
    assert line.endswith("matches nothing; the nearest name is libmultiarch.so")
    assert unmatched("libmultiarch.so") == []
    # A library that is not analysed is not checked.
    assert unmatched("libmultiarch.so", "\nlibraries: {exclude: ['*']}")
