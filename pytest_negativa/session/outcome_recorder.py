"""Outcomes to ``tests.jsonl``: phases, errors, failed children, workers, a lost CUDA context.

The hooks that write them run in the process that reports. pytest-xdist passes its workers' reports
to that process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import traceback
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
from pytest_negativa.session.circumstances import circumstances_of, modules_below
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

# Somebody else ended a child by another signal, sooner or later.
_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
)

# Names of errors in cuda.h, driver_types.h and the headers of NVIDIA's libraries, and what
# cudaGetErrorString and PyTorch make of those that missing or damaged code gives.
_WORDS = re.compile(
    r"""\b(?:CUDA_ERROR|CUBLAS|CUDNN|CUFFT|CURAND|CUSOLVER|CUSPARSE|NVJITLINK|NVRTC)_[A-Z_]+\b
    | \bcudaError[A-Z]\w+
    | \bCUDA\ (?:driver\ )?error\b
    | \bno\ kernel\ image\ is\ available\b
    | \bkernel\ image\ is\ invalid\b
    | \bsymbol\ not\ found\b
    | \binvalid\ device\ (?:function|symbol)\b
    | \binvalid\ resource\ handle\b
    | \bunsupported\ (?:PTX\ version|toolchain)\b
    | \bPTX\ JIT\ compil
    | \billegal\ (?:instruction|memory\ access)\b
    | \bmisaligned\ address\b
    | \binvalid\ program\ counter\b
    | \bdevice-side\ assert\b
    | \bunspecified\ launch\ failure\b
    """,
    re.VERBOSE,
)


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

    A test may ignore the exit status of a child, and nothing else tells that a child without the
    GPU failed. ``Popen`` sets its attribute ``returncode`` when one ends.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._system = os.system
        self._attribute = property(lambda process: process.__dict__.get("returncode"), self._note)

    def start(self) -> None:
        """Note children that failed from now on."""
        setattr(subprocess.Popen, "returncode", self._attribute)  # noqa: B010 (a new one)
        os.system = self._run

    def stop(self) -> None:
        """Note no more of them, unless a session within this one did so already."""
        if vars(subprocess.Popen).get("returncode") is self._attribute:
            delattr(subprocess.Popen, "returncode")
        if os.system == self._run:
            os.system = self._system

    def _run(self, command: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> int:
        status = self._system(command)
        # -1: who ignores SIGCHLD can't wait for it.
        self._add(command, 0 if status < 0 else os.waitstatus_to_exitcode(status))
        return status

    def _note(self, process: subprocess.Popen[bytes], status: int | None) -> None:
        process.__dict__["returncode"] = status
        if status is not None:
            self._add(process.args, status)

    def _add(self, command: object, status: int) -> None:
        if status > 0 or -status in _CRASHES:
            self._failed.add(f"{_program(command)} ended with {status}")

    def take(self) -> list[str]:
        """The children that failed since the last call: program and status."""
        failed, self._failed = self._failed, set()
        return sorted(failed)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        details = details_of(report)
        details.update(attempt=phases_run(item)[call.when], children=self.take())
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


def _program(command: object) -> str:
    first = command[0] if isinstance(command, list | tuple) else command
    text = os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""
    return utf8(os.path.basename(text.partition(" ")[0]))  # noqa: PTH119


def describe_error(error: BaseException) -> str:
    """The exception's class, and the CUDA errors that it, its causes and its parts name."""
    # Without frames: their source lines are no part of the error.
    text = " ".join("".join(traceback.format_exception(error, limit=0)).split())
    named = sorted({match.group() for match in _WORDS.finditer(text)})
    return f"{type(error).__name__} ({', '.join(named)})" if named else type(error).__name__


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
