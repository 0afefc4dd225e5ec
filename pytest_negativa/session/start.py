"""The role of a pytest process (solo, controller, worker), tracing that can't start, hooks.

A process has one of three roles. Solo: runs the tests and reports. With pytest-xdist the workers
run the tests and trace, and the controller reports. Traces are files, so a killed worker's trace is
not lost. ``reporter`` reads them at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from pytest_negativa.devices import has_gpu
from pytest_negativa.errors import NegativaError, OptionError, StoreError, describe_fault
from pytest_negativa.models.environment import ROUND_VARIABLE, SESSION_VARIABLE
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Header, Role
from pytest_negativa.processes.open_watch import CodeFileWatch
from pytest_negativa.processes.programs import end_with
from pytest_negativa.session import tracing_end
from pytest_negativa.session.outcome_recorder import OutcomeRecorder, ReportDetails
from pytest_negativa.session.page_trace import PageTrace
from pytest_negativa.session.reporter import Reporter
from pytest_negativa.session.round_hooks import RoundHooks, RoundOptions
from pytest_negativa.session.traced_process import NotTraced, TracedProcess
from pytest_negativa.storage.handover import (
    Handover,
    find_controller,
    find_handover,
    identify_process,
)
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.rounds import current_round, load_round
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.tracing.children import outer_sockets
from pytest_negativa.tracing.detector import Detector, TraceError
from pytest_negativa.tracing.start import Tracing, make_header, start_detector, start_tracing
from pytest_negativa.tracing.trace_files import end_former_program


def begin(config: pytest.Config, settings: Settings, pages: PageTrace | None) -> None:
    """Determine the role of this process, start tracing, and register the hooks that it needs.

    Args:
        pages: the trace of CPU code, if ``page_trace.begin`` has started one.

    Raises:
        OptionError: an option or ``negativa.yaml`` can't be used.
    """
    role, run, root, round_spec = _role_and_run(config, settings, pages)
    verified = round_spec is not None and round_spec.kind is not RoundKind.TRACE
    files = None
    if role is not Role.WORKER and not verified:
        # Before any test's own code is imported, but for what began earlier in this process. A
        # supervisor watches them itself while the tests run on copies.
        files = CodeFileWatch(sys.path)
        files.start()
    started = _start_tracing(config, settings, role, run, root, in_round=round_spec is not None)
    traced = TracedProcess(role, started)
    plugins = config.pluginmanager
    plugins.register(traced, "negativa-traced-process")
    if role is not Role.CONTROLLER:
        details = ReportDetails()
        details.start()
        config.add_cleanup(details.stop)
        plugins.register(details, "negativa-report-details")
    if round_spec is not None:
        options = RoundOptions(config, round_spec, traced_before=settings.enabled)
        plugins.register(options, "negativa-round-options")
        if verified and role is not Role.CONTROLLER:
            plugins.register(RoundHooks(round_spec), "negativa-round")
    tracing_end.at_end(traced, traced.stop)
    if role is Role.WORKER:
        return
    run.hold()
    if verified or traced.not_traced is None or isinstance(pages, Run):
        # If the folder can't be written, tracing fails, too, and the reporter says so.
        with contextlib.suppress(StoreError):
            plugins.register(OutcomeRecorder(run), "negativa-outcomes")
    if not verified:
        is_round = round_spec is not None
        if traced.not_traced is not None or traced.recording is not None:
            files = None
        reporter = Reporter(config, settings, run, traced, pages, is_round=is_round, files=files)
        plugins.register(reporter, "negativa-reporter")
        tracing_end.at_end(traced, reporter.complete)


def _start_tracing(
    config: pytest.Config,
    settings: Settings,
    role: Role,
    run: Run,
    root: Path,
    *,
    in_round: bool,
) -> Tracing | NotTraced:
    """Start tracing, or tell why it can't start. The tests run in any case."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    header = make_header(run, role, root=root, detector="plugin", worker=worker)
    try:
        if (detector := _start_own_detector(config, settings, run, header)) is not None:
            return Tracing(detector, os.environ, {})
        replay = None
        if not has_gpu():
            if in_round:
                return NotTraced("no GPU here, and a recorded trace would prove nothing")
            if settings.trace.replay is None:
                return NotTraced("no GPU here, and no recorded trace to replay (trace.replay)")
            replay = Path(settings.trace.replay)
            if not replay.is_dir():
                raise OptionError(
                    f"trace.replay: {replay}: no such folder; expected one with recorded traces"
                )
        return start_tracing(
            run,
            role,
            root=root,
            worker=worker,
            level=settings.trace.level,
            replay=replay,
            paths=settings.paths,
            children=settings.trace.children,
        )
    except OptionError:
        raise
    except NegativaError as e:
        # A machine without CUPTI is no error; a run that can't be recorded is one.
        return NotTraced(str(e), is_faulty=isinstance(e, StoreError))


def _start_own_detector(
    config: pytest.Config, settings: Settings, run: Run, header: Header
) -> Detector | None:
    """Start the detector that another plugin provides, if there is one."""
    try:
        detector: Detector | None = config.hook.pytest_negativa_register_detector(
            settings=settings, path=run.new_trace_file(), header=header
        )
        if detector is not None:
            run.make()
            start_detector(detector)
    except NegativaError:
        raise
    except Exception as e:
        # A fault in another plugin's code must not stop the tests.
        raise TraceError(f"the detector of a plugin failed: {describe_fault(e)}") from e
    return detector


def _role_and_run(
    config: pytest.Config, settings: Settings, pages: PageTrace | None
) -> tuple[Role, Run, Path, Round | None]:
    """The role of this process, its run, the project's folder, and the round, if it is of one."""
    if (session := find_controller(os.environ)) is not None:
        round_spec = load_round(Path(session.round_file)) if session.round_file else None
        return Role.WORKER, Run(Path(session.folder)), Path(session.root), round_spec
    runs = RunsFolder(Path(settings.directory))
    outer = find_handover(os.environ)
    if outer is not None and outer.process == identify_process() and not tracing_end.has_begun():
        # A conftest replaced the program of this process by execv.
        former, outer = _take_over(Run(Path(outer.folder))), None
    else:
        # The run whose trace of CPU code has begun.
        former = pages if isinstance(pages, Run) else None
    round_spec = current_round(os.environ)
    if round_spec is not None:
        end_with(round_spec.supervisor)
        run = Run(Path(round_spec.folder))
    else:
        run = former or runs.new_run()
    namespace = config.known_args_namespace
    # With -n0, pytest-xdist starts none, whatever else is given.
    workers = getattr(namespace, "numprocesses", None)
    distributed = getattr(namespace, "tx", None) if workers is None else workers
    session = Handover(
        process=identify_process(),
        folder=str(run),
        root=str(config.rootpath),
        round_file=os.environ[ROUND_VARIABLE] if round_spec is not None else None,
        has_workers=bool(distributed),
        outer_folder=outer.outer_folder if outer is not None else str(run),
        outer_runs=outer.outer_runs if outer is not None else str(runs.folder),
    )
    changes = {SESSION_VARIABLE: session.to_text()}
    if former is None:
        changes |= outer_sockets(os.environ)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    for name, value in changes.items():
        patch.setenv(name, value)
    return Role.CONTROLLER if distributed else Role.SOLO, run, config.rootpath, round_spec


def _take_over(run: Run) -> Run | None:
    """Go on with the run of this process's former program; None if that had begun a test."""
    with contextlib.suppress(StoreError):
        if run.outcomes_file.exists() and read_outcomes(run.outcomes_file).tests:
            return None
    run.outcomes_file.unlink(missing_ok=True)
    end_former_program(run.trace_files())
    return run
