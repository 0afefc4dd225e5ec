"""The end of a traced session: failed and incomplete runs, lost workers, plan, exit status.

Only the process that reports does so: the controller of pytest-xdist, or a session without workers.
The status of a proof is that of ``verifying.supervisor``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_negativa.devices import gpu_names
from pytest_negativa.errors import NegativaError, describe_fault
from pytest_negativa.models.settings import Settings, TraceLevel
from pytest_negativa.models.trace import Usage, UsageWarning
from pytest_negativa.reporting.text import printable, printable_lines
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.runs import MarkKind, Run
from pytest_negativa.storage.system import process_mark

if TYPE_CHECKING:
    from pytest_negativa.models.analysis import ReportContents
    from pytest_negativa.models.code_files import WatchedFiles
    from pytest_negativa.models.library import Element, LibraryMap
    from pytest_negativa.planning.decide import KeepElement
    from pytest_negativa.processes.open_watch import CodeFileWatch
    from pytest_negativa.session.page_trace import PageTrace
    from pytest_negativa.session.traced_process import TracedProcess


# Seconds to wait for traced children that still run when their parent's session is over.
_PATIENCE = 1.0


def describe_session(
    settings: Settings,
    *,
    gpus: Sequence[str],
    recorded: TraceLevel | None,
    not_traced: str | None,
    root: Path,
) -> str:
    """The line of pytest's header that says what the session traces, where and how.

    Args:
        settings: of the session.
        gpus: names of this machine's GPUs, if known.
        recorded: level of the recording that stands in for a GPU.
        not_traced: why no GPU code is traced; None if it is.
        root: paths below this folder are shown relative to it.
    """

    def shown(path: str) -> str:
        return os.path.relpath(path, root) if Path(path).is_relative_to(root) else path

    if not_traced is not None:
        state = f"GPU code not traced: {not_traced}"
    elif recorded is not None:
        state = f"no GPU, replaying {shown(settings.trace.replay or '')}"
    else:
        state = f"tracing on {', '.join(dict.fromkeys(gpus)) or 'a GPU'}"
    level = f"level {(recorded or settings.trace.level).value}"
    config = settings.config and shown(settings.config)
    return printable(f"negativa: {state}, {level}, {config or 'no configuration file'}")


class Reporter:
    """Reports after all tests, above pytest's last line."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        run: Run,
        traced: TracedProcess,
        pages: PageTrace | None,
        *,
        is_round: bool,
        files: CodeFileWatch | None = None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._run = run
        self._traced = traced
        # Then the supervisor reports again, with its verdict.
        self._is_round = is_round
        self._pages = pages
        self._files = files
        # Why traces of workers are incomplete: (code, text).
        self._incomplete: list[tuple[str, str]] = []
        self._workers: set[str] = set()
        self._interrupted = False
        self._is_part_collected = False
        # All tests and the hooks of other plugins at their end.
        self._is_over = False
        self._process = process_mark()
        self._opened: tuple[WatchedFiles, ...] | None = None
        # What the report was made from.
        self._reported: Usage | None = None
        self._failure: str | None = None
        self._next: Run | str | None = None
        # Why the session must fail, whatever its tests did.
        self._failures: Sequence[str] = ()

    def pytest_report_header(self, config: pytest.Config) -> str:
        """Line about what is traced, where, and by which settings."""
        not_traced, recording = self._traced.not_traced, self._traced.recording
        return describe_session(
            self._settings,
            gpus=gpu_names(),
            recorded=None if recording is None else recording.level,
            not_traced=not_traced and not_traced.reason,
            root=config.rootpath,
        )

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count a test that is skipped here as recorded, if the recording has what it used."""
        recording = self._traced.recording
        if recording is None or not report.skipped or hasattr(report, "wasxfail"):
            return None
        return ("recorded", "r", "RECORDED") if report.nodeid in recording.tests else None

    def pytest_keyboard_interrupt(self) -> None:
        # pytest.exit(returncode=0) leaves no other mark.
        self._interrupted = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._is_part_collected = self._is_part_collected or report.failed

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended, here or in a worker."""
        if self._files is not None:
            self._files.read()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended its session, or crashed."""
        name = str(node.gateway.id)
        output = getattr(node, "workeroutput", None)
        if output is None:
            text = (
                f"worker {name} was lost ({error or 'no reason given'}): the report has the code "
                "that it had loaded, but not the code that the rest of its test needs"
            )
            self._incomplete.append(("worker-lost", text))
        elif "negativa" not in output:
            text = f"worker {name} ran without pytest-negativa: the code that it used is unknown"
            self._incomplete.append(("worker-untraced", text))
        elif output["negativa"]:
            text = f"worker {name} was not traced: {output['negativa']}"
            self._incomplete.append(("worker-untraced", text))
        elif not output["negativa"]:
            self._workers.add(name)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        """All plugins have ended and shown their reports; pytest's last line follows."""
        result = yield
        self._end(self._session)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        # Without a terminal, or with --no-summary, pytest asks for no summary.
        self._end(session)
        return result

    def _end(self, session: pytest.Session) -> None:
        """Report, once."""
        if self._is_over or self._traced.why_broken is not None:
            return
        self._is_over = True
        if process_mark() != self._process:
            return  # A test forked, and its child came here. The report is the parent's.
        try:
            self._failures = self._report(session)
        except Exception as e:
            # A fault of this package or of a plugin's hook must not hide the tests' results.
            self._failures = (_describe(e),)
            self._write(f"negativa: no report: {printable_lines(_describe(e))}", red=True)
        if self._pages is not None:
            self._show_pages(self._pages, session)
        # The supervisor of a round verifies next.
        if self._next is not None and not self._is_round:
            from pytest_negativa.reporting.next_command import next_line

            self._write(next_line(self._next))

    def _show_pages(self, pages: PageTrace, session: pytest.Session) -> None:
        from pytest_negativa.session.page_trace import describe_pages

        try:
            marks: dict[MarkKind, str | None] = {
                "failed": self._why_failed(session),
                "failed-tests": format_items(failed, "test failed", "tests failed")
                if (failed := session.testsfailed)
                else None,
                "chosen-tests": chosen_tests(session.config),
            }
            for paragraph in describe_pages(pages, marks, top=self._settings.reports.top):
                self._write(f"{paragraph}\n")
        except Exception as e:
            self._write(
                f"negativa: no report of CPU code: {printable_lines(_describe(e))}", red=True
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, int, int]:
        """Fail the session for its report; its recorded status stays that of its tests."""
        status = yield
        return status or (pytest.ExitCode.TESTS_FAILED if self._failures else status)

    def _report(self, session: pytest.Session) -> Sequence[str]:
        """Report; why the session must fail: crossed thresholds, or no trace at all."""
        traces = self._run.trace_files()
        if (not_traced := self._traced.not_traced) is not None and not traces:
            failure = self._settings.untraced_failure
            reasons = "; ".join(filter(None, (not_traced.reason, failure)))
            fails = not_traced.is_faulty or failure is not None
            if not isinstance(self._pages, Run):
                self._write(f"negativa: nothing was traced: {reasons}", red=fails)
                self._next = "negativa inspect"
            else:
                self._write(f"negativa: no GPU code was traced: {reasons}", red=fails)
                files = [w.format.value for w in self._settings.reports.formats if w.path]
                if files:
                    text = f"{', '.join(files)} not written: these reports need a trace of GPU code"
                    self._write(f"negativa: warning: {text}", yellow=True)
                self._next = self._pages
            return (reasons,) if fails else ()
        if not traces:
            raise NegativaError(f"{self._run.trace_dir}: the traces were removed while tests ran")
        self._failure = self._why_failed(session)
        self._traced.settle()
        usage = self._merge()
        self._run.mark("incomplete", "its pytest process was not seen to end after the report")
        self._save_opened()
        try:
            contents = self._conclude(usage)
        except Exception as e:
            self._run.mark("incomplete", f"its report failed: {e}")
            raise
        self._reported = usage
        self._show(contents)
        return contents.report.crossed

    def _merge(self) -> Usage:
        """Union of all traces; this process still runs."""
        # These imports take 60 ms, so not before the tests.
        from pytest_negativa.pages.gather import with_pages
        from pytest_negativa.tracing.merge import merge_when_ended

        usage = with_pages(
            merge_when_ended(self._run.trace_files, seconds=_PATIENCE, running=(os.getpid(),)),
            self._run,
        )
        gone = self._workers - {process.header.worker for process in usage.processes}
        # Without a process: it may have used any library, also one that its trace doesn't list.
        warnings = tuple(
            UsageWarning(code=code, text=text, process=None)
            for code, text in (
                *self._incomplete,
                *(
                    (
                        "worker-untraced",
                        f"the trace of worker {name} is gone: what it used is unknown",
                    )
                    for name in sorted(gone)
                ),
            )
        )
        return replace(usage, incomplete=usage.incomplete + warnings)

    def _conclude(self, usage: Usage, *, anew: bool = False) -> ReportContents:
        from pytest_negativa.analysis.report import plan_run
        from pytest_negativa.gpucode.workers import LocalProcesses
        from pytest_negativa.reporting.progress import Progress

        # At the interpreter's end the session's terminal is gone, and no process or thread can be
        # started.
        added = self._config.hook.pytest_negativa_libraries(
            config=self._config, settings=self._settings, usage=usage
        )
        progress = None if anew else Progress("negativa: reading libraries", self._write)
        with progress or contextlib.nullcontext():
            return plan_run(
                usage,
                self._settings,
                self._run,
                failure=self._failure,
                added=tuple(os.path.realpath(path) for paths in added for path in paths),
                vetoes=self._vetoes(),
                workers=LocalProcesses(1) if anew else None,
                anew=anew,
                on_done=None if progress is None else progress.update,
            )

    def _save_opened(self, *, at_end: bool = False) -> bool:
        """Write which files of GPU code were opened; whether that is new."""
        if self._files is None:
            return False
        from pytest_negativa.storage.results import save_opened

        if at_end:
            self._files.finish()
        before, self._opened = self._opened, self._files.opened()
        if self._opened == before:
            return False
        save_opened(self._run, self._opened)
        return True

    def complete(self) -> None:
        """Plan anew if code was used after the report; called when the process has ended tracing.

        The plan stays unusable until this is done.
        """
        broken = self._traced.why_broken
        try:
            if broken is not None and not self._is_over and self._run.trace_files():
                self._run.mark("failed", broken)
                sys.stderr.write(f"negativa: no report of {self._run}: {broken}\n")
            if self._reported is None:
                return
            if not self._traced.session_ended:
                self._run.mark("incomplete", broken or f"it ended in {self._traced.where}")
                return
            late = self._plan_late_uses(self._reported)
            self._run.mark("incomplete", None)
        except BaseException as e:
            text = f"{self._run}: no plan of the complete trace: {describe_fault(e)}"
            sys.stderr.write(f"negativa: {text}; plan it again: {self._run.locate_command}\n")
            if isinstance(e, Exception):
                return
            raise
        if late:
            sys.stderr.write(
                f"negativa: used after the report: {', '.join(late)}. The plan in {self._run} was "
                "made anew and keeps this code; the report above does not count it\n"
            )

    def _plan_late_uses(self, reported: Usage) -> Sequence[str]:
        """Plan what the complete trace says; what it says more than the reported usage."""
        from pytest_negativa.analysis.report import describe_late_uses
        from pytest_negativa.storage.records import write_record

        usage = self._merge()
        late = describe_late_uses(reported, usage)
        if self._save_opened(at_end=True):
            late = (*late, "files of GPU code")
        # A child that still ran is gone now: what was kept for its sake need not be.
        if late or usage.incomplete != reported.incomplete:
            self._conclude(usage, anew=True)
        elif usage != reported:
            write_record(self._run.usage_file, usage)
        return late

    def _why_failed(self, session: pytest.Session) -> str | None:
        """Reason against planning; None if all selected tests came to their end."""
        status = session.exitstatus
        if self._interrupted or status == pytest.ExitCode.INTERRUPTED:
            return "it was interrupted"
        if stopped := session.shouldstop or session.shouldfail:
            return f"it was stopped: {stopped}"
        if self._is_part_collected:
            return "files with tests could not be collected"
        lost = [text for code, text in self._incomplete if code == "worker-lost"]
        if session.testsfailed and lost:
            return lost[0]
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "it ran no test"
        ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        return None if ended else f"it ended with exit status {int(status)}"

    def _vetoes(self) -> tuple[KeepElement, ...]:
        hook = self._config.hook

        def keep(library: LibraryMap, element: Element) -> str | None:
            reason: str | None = hook.pytest_negativa_keep_element(
                settings=self._settings, library=library, element=element
            )
            return reason

        # It would be called for each of 40,000 elements: only if a plugin implements it.
        return (keep,) if hook.pytest_negativa_keep_element.get_hookimpls() else ()

    def _show(self, contents: ReportContents) -> None:
        from pytest_negativa.reporting.formats import render_to_screen
        from pytest_negativa.reporting.terminal import render_nothing

        report = contents.report
        nothing = render_nothing(report) is not None
        paragraphs = tuple(render_to_screen(contents, self._settings.reports))
        on_screen = any(wanted.path is None for wanted in self._settings.reports.formats)
        if paragraphs and on_screen and not nothing and (terminal := self._terminal()):
            terminal.ensure_newline()
            terminal.section("GPU code (pytest-negativa)", sep="=")
        for number, paragraph in enumerate(paragraphs):
            # An annotation for a CI job has no headline.
            self._write(
                paragraph if nothing else f"{paragraph}\n", bold=not (number or "::" in paragraph)
            )
        added = self._config.hook.pytest_negativa_report(
            config=self._config, settings=self._settings, report=report
        )
        for text in added:
            self._write(text)
        for limit in report.crossed:
            self._write(f"negativa: {limit}", red=True)
        self._next = self._run

    def _write(self, text: str, **markup: bool) -> None:
        if terminal := self._terminal():
            for line in text.split("\n"):
                terminal.write_line(line, **markup)
        elif markup.get("red"):
            # The session fails for this reason, so the user must see it without a terminal, too.
            sys.stderr.write(f"{text}\n")

    def _terminal(self) -> pytest.TerminalReporter | None:
        # Absent with "-p no:terminal". Report files are written anyway.
        found: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        return found


def _describe(error: Exception) -> str:
    if isinstance(error, NegativaError):
        return str(error)
    return f"{describe_fault(error)} (a fault in pytest-negativa or in one of its hooks)"


def chosen_tests(config: pytest.Config) -> str | None:
    """The choice of tests by ``-k`` and ``-m``, in words; None if all were to run."""
    given = (("-k", config.getoption("keyword", "")), ("-m", config.getoption("markexpr", "")))
    words = [word for flag, value in given if value for word in (flag, value)]
    return f"the tests of {shlex.join(words)} alone" if words else None
