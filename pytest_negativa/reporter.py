"""The end of a traced session: traces to plans and report, in the process that reports."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_negativa.conclude import conclude
from pytest_negativa.config_models import ReportFormat, Settings
from pytest_negativa.errors import NegativaError
from pytest_negativa.merge import merge_traces
from pytest_negativa.models.library import Element, Frame, LibraryMap
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.trace import Usage, UsageWarning
from pytest_negativa.pipeline import Hooks
from pytest_negativa.reporting.terminal import render_nothing, render_report
from pytest_negativa.tracing.roles import Run

if TYPE_CHECKING:
    from pytest_negativa.session import TracedProcess


_SOUND_ENDINGS = frozenset({pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})


class Reporter:
    """Reports once all tests are done, below pytest's own summary."""

    def __init__(
        self, config: pytest.Config, settings: Settings, run: Run, traced: TracedProcess
    ) -> None:
        self._config = config
        self._settings = settings
        self._run = run
        self._traced = traced
        # What workers say of themselves, or don't: (worker, code, text).
        self._lacks: list[tuple[str, str, str]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker is gone: after its session, or because it crashed."""
        name = str(node.gateway.id)
        output = getattr(node, "workeroutput", None)
        if output is None:
            text = (
                f"worker {name} was lost ({error or 'no reason given'}): what it had loaded is "
                "known, what the rest of its test would have needed is not"
            )
            self._lacks.append((name, "worker-lost", text))
        elif "negativa" not in output:
            text = f"worker {name} ran without pytest-negativa: what it used is not known"
            self._lacks.append((name, "worker-untraced", text))
        elif output["negativa"] and self._traced.not_traced is None:
            text = f"worker {name} was not traced: {output['negativa']}"
            self._lacks.append((name, "worker-untraced", text))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        try:
            crossed = self._report(session)
        except NegativaError as e:
            self._write(f"negativa: no report: {e}", red=True)
            crossed = True
        if crossed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result

    def _report(self, session: pytest.Session) -> bool:
        """Report; True if a threshold was crossed."""
        traces = self._run.trace_files()
        if self._traced.not_traced is not None and not traces:
            self._write(f"negativa: nothing was traced: {self._traced.not_traced}")
            return False
        usage = self._with_lacks(merge_traces(traces))
        report = conclude(
            usage,
            self._settings,
            self._run.folder,
            sound=session.exitstatus in _SOUND_ENDINGS,
            hooks=self._hooks(usage),
        )
        self._show(report)
        return bool(report.crossed)

    def _with_lacks(self, usage: Usage) -> Usage:
        processes = {p.header.worker: i for i, p in enumerate(usage.processes)}
        lacks = tuple(
            UsageWarning(code=code, text=text, process=processes.get(worker))
            for worker, code, text in self._lacks
        )
        return replace(usage, incomplete=usage.incomplete + lacks)

    def _hooks(self, usage: Usage) -> Hooks:
        hook = self._config.hook

        def keep(library: LibraryMap, element: Element | Frame) -> str | None:
            reason: str | None = hook.pytest_negativa_keep_element(
                settings=self._settings, library=library, element=element
            )
            return reason

        added = hook.pytest_negativa_libraries(
            config=self._config, settings=self._settings, usage=usage
        )
        return Hooks(
            libraries=tuple(os.path.realpath(path) for paths in added for path in paths),
            # Asked for each of 40,000 elements: not where nobody would answer.
            vetoes=(keep,) if hook.pytest_negativa_keep_element.get_hookimpls() else (),
        )

    def _show(self, report: RunReport) -> None:
        if any(r.format is ReportFormat.TERMINAL for r in self._settings.reports.formats):
            if (line := render_nothing(report)) is not None:
                self._write(line)
                return
            self._section()
            for paragraph in render_report(report, self._settings.reports.top):
                self._write(paragraph + "\n")
        added = self._config.hook.pytest_negativa_report(
            config=self._config, settings=self._settings, report=report
        )
        for text in added:
            self._write(text)

    def _section(self) -> None:
        if terminal := self._terminal():
            terminal.section("GPU code (pytest-negativa)", sep="=")

    def _write(self, text: str, **markup: bool) -> None:
        if terminal := self._terminal():
            for line in text.split("\n"):
                terminal.write_line(line, **markup)

    def _terminal(self) -> pytest.TerminalReporter | None:
        # Absent with "-p no:terminal"; the files are written all the same.
        found: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        return found
