"""Report files (JUnit, coverage, HTML) in rounds: which round writes to the user's paths.

The traced run writes them to the paths that the user gave. In a session without a traced run, the
last run of all tests on the copies does. All other rounds write to their own folders.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.storage.runs import Run

# The attributes of options that name a file or folder, and its name in a round's folder.
_REPORTS = {
    "xmlpath": "junit.xml",  # --junit-xml
    "log_file": "log.txt",  # --log-file
    "htmlpath": "report.html",  # pytest-html
    "json_report_file": "report.json",  # pytest-json-report
    "report_log": "report.jsonl",  # pytest-reportlog
    "csv_path": "report.csv",  # pytest-csv
    "md_report_output": "report.md",  # pytest-md-report
    "benchmark_json": "benchmark.json",  # pytest-benchmark
    "allure_report_dir": "allure",  # allure-pytest
}


def writes_reports(round_spec: Round, *, traced_before: bool) -> bool:
    """Whether a round writes reports to the paths that the user gave.

    Args:
        traced_before: the session has a traced run of its own.
    """
    if round_spec.kind is RoundKind.TRACE:
        return True
    return round_spec.kind is RoundKind.VERIFY and round_spec.tests is None and not traced_before


def append_coverage(config: pytest.Config) -> None:
    """Let pytest-cov add to the coverage of earlier rounds."""
    # pytest-cov reads it before any plugin is configured.
    if getattr(config.known_args_namespace, "cov_source", None):
        config.known_args_namespace.cov_append = True


class RoundReports:
    """Directs reports into the round's folder."""

    def __init__(self, round_spec: Round) -> None:
        self._folder = Run(Path(round_spec.folder)).report_files

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        for option, name in _REPORTS.items():
            given = getattr(config.option, option, None)
            # pytest-benchmark before 5.2 stores an open file, which is empty already.
            if hasattr(given, "write"):
                continue
            if given or (option == "log_file" and config.getini(option)):
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / name
                setattr(config.option, option, path if isinstance(given, Path) else str(path))
