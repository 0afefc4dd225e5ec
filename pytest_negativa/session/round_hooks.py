"""Rounds: where their reports go, which tests they run, reruns of flaky ones, when they stop early.

The traced run writes report files (JUnit, coverage, HTML) to the paths that the user gave. In a
session without a traced run, the last run of all tests on the copies does. All other rounds write
to their own folders.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_negativa.models.round import LEAST_RERUNS, Round, RoundKind
from pytest_negativa.session.circumstances import BY_CACHE
from pytest_negativa.session.cuda_context import lost_context
from pytest_negativa.session.outcome_recorder import CONTEXT_LOST, details_of
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.system import System

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


class RoundOptions:
    """Changes the options of a round.

    Args:
        traced_before: the session has a traced run of its own.
    """

    def __init__(self, config: pytest.Config, round_spec: Round, *, traced_before: bool) -> None:
        self._folder = Run(Path(round_spec.folder)).report_files
        runs_all = round_spec.kind is RoundKind.VERIFY and round_spec.tests is None
        self._redirects = round_spec.kind is not RoundKind.TRACE and (traced_before or not runs_all)
        # pytest-cov adds to the coverage of earlier rounds. It reads this before any plugin is
        # configured.
        if self._redirects and getattr(config.known_args_namespace, "cov_source", None):
            config.known_args_namespace.cov_append = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        # The session before is another round.
        for option in BY_CACHE:
            setattr(config.option, option, False)
        for option, name in _REPORTS.items() if self._redirects else ():
            given = getattr(config.option, option, None)
            # pytest-benchmark before 5.2 stores an open file, which is empty already.
            if hasattr(given, "write"):
                continue
            if given or (option == "log_file" and config.getini(option)):
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / name
                setattr(config.option, option, path if isinstance(given, Path) else str(path))


class RoundHooks:
    """Selects the tests of a round, and ends it if further tests would tell nothing."""

    def __init__(self, round_spec: Round) -> None:
        self._round = round_spec
        # By node id of a test that is repeated: whether its phases passed, run by run.
        self._ends: dict[str, list[list[bool]]] = defaultdict(list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items.sort(key=lambda item: utf8(item.nodeid) in self._round.repeated)
        if self._round.tests is None:
            return
        wanted = frozenset(self._round.tests)
        if left_out := [item for item in items if utf8(item.nodeid) not in wanted]:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if utf8(item.nodeid) in wanted]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Repeat tests, each time with fixtures of all scopes made anew.

        At once, because a worker of pytest-xdist takes reports of its current test alone.
        """
        ends = self._ends[item.nodeid]
        if (passed := self._round.repeated.get(utf8(item.nodeid))) is None:
            return (yield)
        ends.append([])
        done = yield
        if len(ends) > 1:
            return done
        begin, seconds = System.monotonic(), self._round.seconds
        share = math.inf if seconds is None else seconds / len(self._round.repeated)
        while len(ends) < self._round.most:
            as_traced = [all(phases) is passed for phases in ends]
            # First as when traced, and otherwise after that.
            is_seen = as_traced != sorted(as_traced)
            late = len(ends) >= LEAST_RERUNS and System.monotonic() - begin > share
            if is_seen or late or item.session.shouldstop or item.session.shouldfail:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._ends[item.nodeid]:
            self._ends[item.nodeid][-1].append(report.passed)
        # A test may pass although it lost the context: it expected an error, or used the CPU then.
        if report.failed or report.when == "teardown":
            error = lost_context()
            if error is not None:
                details_of(report)["gpu_error"] = error
                # Also after a test that failed when traced: what follows would mean nothing.
                item.session.shouldstop = (
                    f"{CONTEXT_LOST} ({error}): the remaining tests run in a fresh process"
                )
        return report
