"""``--negativa-cpu``: the process starts itself again, with ``watch.c`` in LD_AUDIT.

The loader must be told before the process starts. So ``execve`` replaces the pytest process by
itself, before any conftest is imported, with ``pages/watch.c`` in LD_AUDIT. Children inherit
it, pytest-xdist's workers included. This module imports little, because the process imports all of
it twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.models.environment import PAGES_RUN_VARIABLE
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.session import tracing_end
from pytest_negativa.session.request import become, is_replaceable
from pytest_negativa.settings.resolve import load_settings
from pytest_negativa.storage.handover import ProcessIdentity, find_controller, identify_process
from pytest_negativa.storage.rounds import current_round
from pytest_negativa.storage.runs import MarkKind, Run, RunsFolder

PageTrace = Run | str
"""The run that the trace of a session's CPU code belongs to, or why there is no trace."""


def is_in_round() -> bool:
    """Whether this process is the program of a round, or a pytest-xdist worker of it."""
    return find_controller(os.environ) is not None or current_round(os.environ) is not None


def begin(config: pytest.Config, flags: Mapping[str, Any]) -> tuple[Settings, PageTrace | None]:
    """Load the settings, and trace the CPU code of this process and its children from their start.

    May replace the process.

    Returns:
        No trace if none is wanted, in a worker of pytest-xdist, and in the rounds of a proof.

    Raises:
        OptionError: an option or ``negativa.yaml`` can't be used.
        NegativaError: the run's folder can't be made, or the interpreter can't be started.
    """
    settings = load_settings(
        flags, os.environ, root=config.rootpath, cwd=config.invocation_params.dir
    )
    tracing_end.end_former_sessions()
    if not settings.cpu or find_controller(os.environ) is not None:
        return settings, None
    return settings, _start(config, settings)


def _start(config: pytest.Config, settings: Settings) -> PageTrace | None:
    from pytest_negativa.pages.auditors import LOGS_VARIABLE, traces_cpu, why_unwatchable

    # What this process was started again for. A test that calls pytest.main begins a session of its
    # own.
    handed = json.loads(os.environ.get(PAGES_RUN_VARIABLE, "null"))
    is_handed = handed and ProcessIdentity(*handed["process"]) == identify_process()
    if is_handed and not tracing_end.has_begun():
        return Run(Path(handed["folder"]))
    round_spec = current_round(os.environ)
    if round_spec is not None and round_spec.kind is not RoundKind.TRACE:
        return None
    if traces_cpu(os.environ):
        # That of the supervisor, or of a session around it.
        if round_spec is not None and not tracing_end.has_begun():
            run = Run(Path(round_spec.folder))
            if os.environ[LOGS_VARIABLE] == str(run.page_logs.absolute()):
                return run
        return "the session that started this one traces it"
    if (reason := why_unwatchable()) is not None:
        return reason
    if not is_replaceable(config):
        return (
            "a program called pytest (pytest.main) and had loaded its libraries by then; trace "
            "that program: negativa trace --cpu -- COMMAND"
        )
    runs = RunsFolder(Path(settings.directory))
    run = runs.new_run() if round_spec is None else Run(Path(round_spec.folder))
    return _start_again(run, Path(config.invocation_params.dir))


def _start_again(run: Run, cwd: Path) -> NoReturn:
    from pytest_negativa.pages.page_watch import watch_pages

    environ = {
        **watch_pages(os.environ, run, run.folder.parent),
        PAGES_RUN_VARIABLE: json.dumps({"process": identify_process(), "folder": str(run)}),
    }
    try:
        # With the interpreter's own options (-X, -W, -m).
        become(sys.orig_argv[1:], environ, cwd)
    except NegativaError:
        # The folder of a round is not a run's, and stays.
        with contextlib.suppress(StoreError):
            run.delete()
        raise


def describe_pages(
    trace: PageTrace, marks: Mapping[MarkKind, str | None], *, top: int
) -> Iterator[str]:
    """Report on CPU code when the tests have run, a paragraph at a time.

    Args:
        marks: why the session failed, how many tests failed, and which were chosen; None for no
            such mark.
        top: rows of the table; 0 for all.

    Raises:
        NegativaError: the trace can't be read.
    """
    from pytest_negativa.pages.functions import summarize
    from pytest_negativa.pages.gather import gather
    from pytest_negativa.reporting.pages import render_host_report

    if isinstance(trace, str):
        yield f"negativa: CPU code was not traced: {trace}"
        return
    for kind, reason in marks.items():
        if reason is not None:
            trace.mark(kind, reason)
    usage = gather(trace)
    if usage is not None:
        trace.make_latest()
        yield from render_host_report(summarize(usage), top=top)
