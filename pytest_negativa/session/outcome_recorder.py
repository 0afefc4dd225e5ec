"""Outcomes to ``tests.jsonl``: phases, aspects, keywords, workers, a lost CUDA context.

The hooks that write them run in the process that reports. pytest-xdist passes its workers' reports
to that process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import (
    CollectionFailed,
    PhaseReported,
    SessionFinished,
    SessionKind,
    SessionStarted,
    TestStarted,
    WorkerEnded,
)
from pytest_negativa.session.child_ends import ChildEnds
from pytest_negativa.session.circumstances import circumstances_of, modules_below
from pytest_negativa.session.error_words import describe_error
from pytest_negativa.session.traced_process import phases_run
from pytest_negativa.storage.jsonl import LineWriter
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.system import System

CONTEXT_LOST = "negativa: the CUDA context is lost"
"""The begin of the reason for which a session stops itself; see ``cuda_context``."""

_MODULES = "negativa_modules"
"""Key of the modules that a worker of pytest-xdist imported."""

_MAX_TEXT = 500


def details_of(report: pytest.TestReport) -> dict[str, Any]:
    """Fields of ``PhaseReported`` that the process of the test adds to its report.

    Plain values travel from workers to the controller.
    """
    details: dict[str, Any] = report.__dict__.setdefault("negativa", {})
    return details


class ReportDetails:
    """Adds to the reports of this process's tests what the process that reports can't tell.

    That is how often the phase ran, the type of the error, the children that failed, the name of a
    subtest, and the words that select the test. The plugin flaky reports the last attempt only.
    pytest 9 changes the name of a subtest on the way from a worker of pytest-xdist.
    """

    def __init__(self, ends: ChildEnds) -> None:
        self._ends = ends

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        details = details_of(report)
        details.update(attempt=phases_run(item)[call.when], children=self._ends.take())
        # Whatever another plugin made of the outcome, the phase raised this.
        if call.excinfo is not None:
            details["error_type"] = describe_error(call.excinfo.value)
        if call.when == "setup":
            markers = sorted({utf8(mark.name) for mark in item.iter_markers()})
            details.update(markers=markers, keywords=_keywords(item))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[_MODULES] = modules_below(session.config.rootpath)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # As pytest 9 and pytest-subtests have it.
        context = getattr(report, "context", None)
        if context is not None:
            values = ", ".join(f"{name}={value}" for name, value in context.kwargs.items())
            name = f"[{'' if context.msg is None else context.msg}] ({values})"
            details_of(report)["subtest"] = utf8(name)


class OutcomeRecorder:
    """Writes the outcomes of a session into a run's folder."""

    def __init__(self, run: Run) -> None:
        """Create the file and begin it.

        Raises:
            StoreError: the file can't be created.
        """
        self._writer = LineWriter(run.outcomes_file)
        self._writer.write(
            SessionStarted(
                command=tuple(utf8(word) for word in sys.orig_argv),
                time_ns=System.time_ns(),
                kind=SessionKind.PYTEST,
            )
        )
        self._nodes: list[Any] = []
        self._finished: SessionFinished | None = None
        # Paths of files with tests, as node ids have them, and of modules that workers imported.
        self._files: set[str] = set()
        # Tests may change it.
        self._environ = dict(os.environ)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._files.add(nodeid.partition("::")[0])
        self._writer.write(TestStarted(nodeid=utf8(nodeid), time_ns=System.time_ns()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # pytest-xdist's name of the worker; a report of its crash has only the node.
        node = getattr(report, "node", None)
        self._writer.write(
            PhaseReported(
                nodeid=utf8(report.nodeid),
                when=str(report.when),
                outcome=report.outcome,
                duration=float(getattr(report, "duration", 0.0)),
                time_ns=System.time_ns(),
                expected_failure=hasattr(report, "wasxfail"),
                worker=getattr(report, "worker_id", node and node.gateway.id),
                text=None if report.passed else _text(report),
                # A plugin may report a phase that did not run.
                **{"attempt": 0, **details_of(report)},
            )
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._writer.write(
                CollectionFailed(nodeid=utf8(report.nodeid), text=_text(report) or "")
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._files.update(modules_below(session.config.rootpath))
        self._finished = SessionFinished(
            exit_status=int(session.exitstatus),
            # What comes now is no test: it must not count as a long one.
            time_ns=System.time_ns(),
            context_lost=any(
                CONTEXT_LOST in str(getattr(one, "shouldstop", ""))
                # pytest-xdist's controller does not copy its workers' reasons to the session.
                for one in (session, session.config.pluginmanager.get_plugin("dsession"))
            ),
            circumstances=circumstances_of(session.config, self._environ, self._files),
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, int, int]:
        """Write the last line, unless a hook at the session's end raised an error."""
        status = yield
        # pytest-xdist has waited for all workers by now.
        for node in self._nodes:
            # execnet tells their statuses nowhere else. Workers of another machine have no such
            # process.
            process = getattr(getattr(node.gateway, "_io", None), "popen", None)
            if process is not None and process.returncode is not None:
                self._writer.write(
                    WorkerEnded(worker=str(node.gateway.id), status=process.returncode)
                )
        if self._finished is not None:
            self._writer.write(replace(self._finished, exit_status=int(status)))
        return status

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        self._nodes.append(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # A worker that crashed has no output.
        self._files.update(getattr(node, "workeroutput", {}).get(_MODULES, ()))


def _keywords(item: pytest.Item) -> list[str]:
    """The words that ``-k`` compares. Which these are differs from version to version of pytest."""
    # pytest has no public function for it. A version without this one must not break a session.
    try:
        from _pytest.mark import KeywordMatcher

        names = KeywordMatcher.from_item(item)._names
    except (AttributeError, ImportError):
        return []
    return sorted(map(utf8, names))


def _text(report: Any) -> str | None:
    """The error in one line, or the reason why a test was skipped."""
    detail = report.longrepr
    if isinstance(detail, tuple) and len(detail) == 3:
        text = str(detail[2])
    elif (crash := getattr(detail, "reprcrash", None)) is not None:
        text = str(crash.message)
    else:
        text = str(detail or "")
    text = utf8(" ".join(text.split()))
    return text[:_MAX_TEXT] or None
